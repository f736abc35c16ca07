/* The calculator of the page `book/costs.md`: reads its fields, shows what `costs.js` finds. Nothing leaves the page. */
(() => {
  "use strict";
  const form = document.getElementById("calc");
  if (!form) return;
  const costs = window.costs;
  const at = (name) => document.getElementById(`calc-${name}`);
  const COUNTS = [...costs.SIZES, "B", "T"];
  const RATES = ["flops_per_second", "bytes_per_second"];
  const SETTINGS = ["family", ...COUNTS, "bytes_per_element", ...RATES, "tied", "checkpointing"];
  const NOTHING = "—";

  // Fields -----------------------------------------------------------------------------------------------------------

  /** A setting as text; switches are "1" or "0". */
  function get(name) {
    if (name === "family") return form.elements.family.value;
    const field = at(name);
    return field.type === "checkbox" ? String(Number(field.checked)) : field.value;
  }

  /** Put text into a field. A choice that does not exist is left as it was. */
  function set(name, text) {
    if (name === "family") {
      for (const choice of form.elements.family) if (choice.value === text) choice.checked = true;
    } else if (at(name).type === "checkbox") {
      if (text === "0" || text === "1") at(name).checked = text === "1";
    } else if (at(name).tagName === "SELECT") {
      if ([...at(name).options].some((option) => option.value === text)) at(name).value = text;
    } else {
      at(name).value = text.slice(0, 40);
    }
  }

  /** Why a text is no whole number from 1 on, or "". */
  function wrongCount(text) {
    if (text === "") return "Empty: give a whole number.";
    if (/^-\s*[\d.]/.test(text)) return "Negative: it must be at least 1.";
    if (/^0+$/.test(text)) return "Zero: it must be at least 1.";
    if (/^\d*\.\d*$/.test(text)) return "Not whole: give a whole number.";
    if (!/^\d+$/.test(text)) return "Give a whole number in digits, as in 4096.";
    return text.length > 15 ? "Too large: at most 15 digits." : "";
  }

  /** Why a text is no number above 0, or "". */
  function wrongRate(text) {
    if (text === "") return "Empty: give a number.";
    if (!Number.isFinite(Number(text))) return "Give a number, as in 1e12.";
    return Number(text) > 0 ? "" : "It must be above 0.";
  }

  /** Say beside a field what is wrong with it; returns whether it is right. */
  function judge(name, message) {
    const said = at(`${name}-error`);
    if (said.textContent !== message) said.textContent = message;
    at(name).setAttribute("aria-invalid", String(message !== ""));
    return message === "";
  }

  /** What the fields say. `config`, `run` and `machine` are null where a field of theirs is wrong. */
  function read() {
    const text = Object.fromEntries(SETTINGS.map((name) => [name, get(name).trim()]));
    const right = {};
    for (const name of COUNTS) right[name] = judge(name, wrongCount(text[name]));
    for (const name of RATES) right[name] = judge(name, wrongRate(text[name]));
    if (right.n_heads && right.n_kv_heads && BigInt(text.n_heads) % BigInt(text.n_kv_heads) !== 0n) {
      const message = `${text.n_heads} heads cannot share ${text.n_kv_heads} key heads equally: it must divide H.`;
      right.n_kv_heads = judge("n_kv_heads", message);
    }
    const all = (names) => names.every((name) => right[name]);
    const sizes = () => Object.fromEntries(costs.SIZES.map((name) => [name, BigInt(text[name])]));
    return {
      config: all(costs.SIZES) ? { family: text.family, ...sizes(), tied: text.tied === "1" } : null,
      run: all(["B", "T"]) ? { B: BigInt(text.B), T: BigInt(text.T), b: BigInt(text.bytes_per_element) } : null,
      machine: all(RATES) ? RATES.map((name) => Number(text[name])) : null,
      checkpointing: text.checkpointing === "1",
    };
  }

  // Numbers as text --------------------------------------------------------------------------------------------------

  const whole = (n) => n.toLocaleString("en-US");

  /** Three digits and a unit: the last of `units` that is not larger than the number. */
  function short(x, units) {
    const [size, unit] = units.findLast(([size]) => x >= size) ?? units[0];
    const n = x / size;
    const plain = n >= 999.5 ? Math.round(n).toLocaleString("en-US") : String(Number(n.toPrecision(3)));
    return `${n >= 1e6 ? n.toExponential(2) : plain} ${unit}`;
  }

  const scale = (names, base) => names.map((name, i) => [base ** (i + 1), name]);
  const MANY = scale(["thousand", "million", "billion", "trillion"], 1e3);
  const FLOPS = scale(["kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs", "EFLOPs"], 1e3);
  const DECIMAL = scale(["kB", "MB", "GB", "TB", "PB", "EB"], 1e3);
  const BINARY = scale(["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"], 1024);
  const TIMES = [[1e-9, "ns"], [1e-6, "µs"], [1e-3, "ms"], [1, "s"], [60, "minutes"], [3600, "hours"], [86400, "days"]];

  const rounded = (n, units) => (n < 1000n ? "" : short(Number(n), units));
  const inBytes = (n) => (n < 1000n ? "" : `${short(Number(n), BINARY)}, ${short(Number(n), DECIMAL)}`);

  /** A formula with numbers in place of its letters. */
  function filled(formula, numbers) {
    return formula.replace(/[A-Za-z_]+/g, (word) => (word in numbers ? whole(numbers[word]) : word));
  }

  // Showing ----------------------------------------------------------------------------------------------------------

  function write(name, text) {
    if (at(name).textContent !== text) at(name).textContent = text;
  }

  /** A number with its short form; nothing where there is none. */
  function number(name, n, unit, inShort) {
    write(name, n === null ? NOTHING : `${whole(n)}${unit}`);
    if (at(`${name}-short`)) write(`${name}-short`, n === null ? "" : inShort(n));
  }

  /** A formula, in letters and in numbers. */
  function formula(name, text, numbers) {
    write(`${name}-formula`, text);
    write(`${name}-numbers`, numbers === null || text.startsWith("0") ? "" : filled(text, numbers));
  }

  const FORMULAS = {
    GPT: {
      embedding: "V × C",
      positions: "context_length × C",
      attention: "L × (2 × C × H × D + 2 × C × K × D + H × D + 2 × K × D + C)",
      mlp: "L × (2 × C × F + F + C)",
      norms: "(2 × L + 1) × 2 × C",
      matrices: "2 × C × H × D + 2 × C × K × D + 2 × C × F",
      layer: "B × T × (6 × C + 4 × H × D + 2 × F) + 2 × B × H × T × T",
    },
    Llama: {
      embedding: "V × C",
      positions: "0, rotary",
      attention: "L × (2 × C × H × D + 2 × C × K × D)",
      mlp: "L × 3 × C × F",
      norms: "(2 × L + 1) × C",
      matrices: "2 × C × H × D + 2 × C × K × D + 3 × C × F",
      layer: "B × T × (6 × C + 4 × H × D + 4 × F) + 2 × B × H × T × T",
    },
  };

  function showParameters(config, of) {
    const parts = config && costs.parameterParts(config);
    const total = config && costs.countParameters(config);
    for (const part of ["embedding", "positions", "attention", "mlp", "norms", "head"]) {
      const head = get("tied") === "1" ? "0, it is the embedding" : "V × C";
      formula(part, part === "head" ? head : of[part], config && costs.letters(config));
      number(part, config && parts[part], "");
      const promille = config && (2000n * parts[part] + total) / (2n * total); // rounded
      write(`${part}-share`, config ? `${(Number(promille) / 10).toFixed(1)} %` : "");
    }
    number("parameters", total, "", (n) => rounded(n, MANY));
  }

  function showRun(config, run, of) {
    const known = config && run;
    const letters = known && { ...costs.letters(config), ...run, M: costs.layerMatrices(config) };
    formula("matrices", of.matrices, config && costs.letters(config));
    const flops = [
      ["forward", "B × T × (L × (2 × M + 4 × T × H × D) + 2 × C × V)", run && [run.B, run.T]],
      ["step", "B × (L × (2 × M + 4 × T × H × D) + 2 × C × V)", run && [run.B, 1n, run.T]],
    ];
    for (const [name, text, what] of flops) {
      formula(name, text, letters);
      number(name, known && costs.forwardFlops(config, ...what), " FLOPs", (n) => rounded(n, FLOPS));
    }
    const memory = [
      ["cache", "2 × L × B × T × K × D × b", () => costs.kvCacheBytes(config, run.B, run.T, run.b)],
      ["scores", "B × H × T × T × b", () => costs.scoreBytes(config, run.B, run.T, run.b)],
    ];
    for (const [name, text, count] of memory) {
      formula(name, text, letters);
      number(name, known && count(), " bytes", inBytes);
    }
  }

  function showTraining(config, run, checkpointing, of) {
    const known = config && run;
    const found = known && costs.trainingBytes(config, run.B, run.T, run.b, checkpointing);
    const parts = known && costs.activationParts(config, run.B, run.T);
    const letters = known && { ...costs.letters(config), ...run, ...parts, N: costs.countParameters(config) };
    const activations = checkpointing
      ? "(L × B × T × C + max(layer + B × T × F, end)) × b"
      : "(L × layer + end) × b";
    const formulas = { weights: "N × b", gradients: "N × b", optimizer: "2 × N × b", activations };
    for (const [name, text] of Object.entries(formulas)) {
      formula(name, text, letters);
      number(name, found && found[name], "", inBytes);
    }
    formula("layer", of.layer, letters);
    formula("end", "3 × B × T × (C + V)", letters);
    number("training", found && found.total, " bytes", inBytes);
  }

  function showTimes(config, run, machine) {
    const known = config && run && machine;
    const moved = known && costs.countParameters(config) * run.b + costs.kvCacheBytes(config, run.B, run.T, run.b);
    const work = { read: run && [run.B, run.T], write: run && [run.B, 1n, run.T] };
    for (const [name, what] of Object.entries(work)) {
      if (!known) {
        for (const part of ["", "-why", "-computing", "-moving"]) write(`${name}${part}`, part ? "" : NOTHING);
        continue;
      }
      const flops = costs.forwardFlops(config, ...what);
      const [computing, moving] = [Number(flops) / machine[0], Number(moved) / machine[1]];
      write(name, short(costs.rooflineSeconds(flops, moved, ...machine), TIMES));
      write(`${name}-why`, computing >= moving ? "computing takes longer" : "moving bytes takes longer");
      write(`${name}-computing`, `${whole(flops)} FLOPs / ${get(RATES[0])} FLOP/s = ${short(computing, TIMES)}`);
      write(`${name}-moving`, `${whole(moved)} bytes / ${get(RATES[1])} bytes/s = ${short(moving, TIMES)}`);
    }
  }

  /** Name the published model whose sizes these are, and where they stand. */
  function showModel(config) {
    const same = (model) => config && Object.entries(model.config).every(([name, value]) => config[name] === value);
    const i = costs.MODELS.findIndex(same);
    at("model").value = i < 0 ? "" : String(i);
    at("source").hidden = i < 0;
    if (i >= 0) {
      write("source-link", `published sizes of ${costs.MODELS[i].name}`);
      at("source-link").href = costs.MODELS[i].source;
    }
  }

  function show() {
    const { config, run, machine, checkpointing } = read();
    const of = FORMULAS[get("family")];
    showModel(config);
    showParameters(config, of);
    showRun(config, run, of);
    showTraining(config, run, checkpointing, of);
    showTimes(config, run, machine);
    const long = config && run && run.T > config.context_length;
    write("T-note", long ? `Too long: this model takes at most ${whole(config.context_length)} tokens.` : "");
    return config && run && machine;
  }

  // The address ------------------------------------------------------------------------------------------------------

  function toAddress() {
    const settings = new URLSearchParams(SETTINGS.map((name) => [name, get(name).trim()]));
    history.replaceState(null, "", `#${settings}`);
  }

  function fromAddress() {
    for (const [name, text] of new URLSearchParams(location.hash.slice(1))) if (SETTINGS.includes(name)) set(name, text);
  }

  // ------------------------------------------------------------------------------------------------------------------

  for (const family of ["GPT", "Llama"]) {
    const group = document.createElement("optgroup");
    group.label = family === "GPT" ? "GPT" : "Llama and models built like it";
    costs.MODELS.forEach((model, i) => {
      if (model.config.family === family) group.append(new Option(model.name, String(i)));
    });
    at("model").append(group);
  }
  at("model").addEventListener("input", () => {
    if (at("model").value === "") return;
    const { config } = costs.MODELS[Number(at("model").value)];
    for (const name of ["family", ...costs.SIZES]) set(name, String(config[name]));
    set("tied", config.tied ? "1" : "0");
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", () => {
    if (show()) toAddress();
  });
  window.addEventListener("hashchange", () => {
    fromAddress();
    show();
  });
  fromAddress();
  show();
  form.hidden = false;
  document.getElementById("calc-off").hidden = true;
})();
