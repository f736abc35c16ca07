/* What a model costs before it runs: `tfmlib/costs.py` once more, for the calculator of the page `book/costs.md`.
 *
 * Whole numbers are BigInt, so that every count is exact. A config is an object with `family`, "GPT" or "Llama", the
 * sizes named in SIZES, and `tied`. Functions have the names and the order of arguments that they have in Python.
 */
(() => {
  "use strict";

  const SIZES = [
    "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size", "context_length",
  ];

  // Published models that one of the two families expresses exactly: name, family, SIZES, tied, where the sizes stand.
  const MODELS = [
    ["GPT-2 small", "GPT", [12, 768, 12, 12, 64, 3072, 50257, 1024], true,
      "https://huggingface.co/openai-community/gpt2/blob/main/config.json"],
    ["GPT-2 medium", "GPT", [24, 1024, 16, 16, 64, 4096, 50257, 1024], true,
      "https://huggingface.co/openai-community/gpt2-medium/blob/main/config.json"],
    ["GPT-2 large", "GPT", [36, 1280, 20, 20, 64, 5120, 50257, 1024], true,
      "https://huggingface.co/openai-community/gpt2-large/blob/main/config.json"],
    ["GPT-2 XL", "GPT", [48, 1600, 25, 25, 64, 6400, 50257, 1024], true,
      "https://huggingface.co/openai-community/gpt2-xl/blob/main/config.json"],
    ["Llama-2-7B", "Llama", [32, 4096, 32, 32, 128, 11008, 32000, 4096], false,
      "https://huggingface.co/meta-llama/Llama-2-7b-hf/blob/main/config.json"],
    ["Llama-2-13B", "Llama", [40, 5120, 40, 40, 128, 13824, 32000, 4096], false,
      "https://huggingface.co/meta-llama/Llama-2-13b-hf/blob/main/config.json"],
    ["Llama-2-70B", "Llama", [80, 8192, 64, 8, 128, 28672, 32000, 4096], false,
      "https://huggingface.co/meta-llama/Llama-2-70b-hf/blob/main/config.json"],
    ["Llama-3-8B", "Llama", [32, 4096, 32, 8, 128, 14336, 128256, 8192], false,
      "https://huggingface.co/meta-llama/Meta-Llama-3-8B/blob/main/config.json"],
    ["Llama-3-70B", "Llama", [80, 8192, 64, 8, 128, 28672, 128256, 8192], false,
      "https://huggingface.co/meta-llama/Meta-Llama-3-70B/blob/main/config.json"],
    ["Llama-3.1-405B", "Llama", [126, 16384, 128, 8, 128, 53248, 128256, 131072], false,
      "https://huggingface.co/meta-llama/Llama-3.1-405B/blob/main/config.json"],
    ["Llama-3.2-1B", "Llama", [16, 2048, 32, 8, 64, 8192, 128256, 131072], true,
      "https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json"],
    ["Llama-3.2-3B", "Llama", [28, 3072, 24, 8, 128, 8192, 128256, 131072], true,
      "https://huggingface.co/meta-llama/Llama-3.2-3B/blob/main/config.json"],
    ["TinyLlama-1.1B", "Llama", [22, 2048, 32, 4, 64, 5632, 32000, 2048], false,
      "https://huggingface.co/TinyLlama/TinyLlama-1.1B-intermediate-step-1431k-3T/blob/main/config.json"],
    ["SmolLM2-135M", "Llama", [30, 576, 9, 3, 64, 1536, 49152, 8192], true,
      "https://huggingface.co/HuggingFaceTB/SmolLM2-135M/blob/main/config.json"],
    ["Mistral-7B-v0.1", "Llama", [32, 4096, 32, 8, 128, 14336, 32000, 32768], false,
      "https://huggingface.co/mistralai/Mistral-7B-v0.1/blob/main/config.json"],
    ["Gemma-2B", "Llama", [18, 2048, 8, 1, 256, 16384, 256000, 8192], true,
      "https://huggingface.co/google/gemma-2b/blob/main/config.json"],
    ["Gemma-7B", "Llama", [28, 3072, 16, 16, 256, 24576, 256000, 8192], true,
      "https://huggingface.co/google/gemma-7b/blob/main/config.json"],
  ].map(([name, family, sizes, tied, source]) => ({
    name, source,
    config: { family, ...Object.fromEntries(SIZES.map((size, i) => [size, BigInt(sizes[i])])), tied },
  }));

  /** The sizes by the lesson's letters, as BigInt. Throws a TypeError for another family. */
  function letters(config) {
    if (config.family !== "GPT" && config.family !== "Llama") {
      throw new TypeError(`family must be "GPT" or "Llama", got ${config.family}`);
    }
    const [L, C, H, K, D, F, V, context_length] = SIZES.map((size) => BigInt(config[size]));
    return { L, C, H, K, D, F, V, context_length };
  }

  function mlpMatrices(config) {
    return config.family === "GPT" ? 2n : 3n;
  }

  /** How many numbers each part of a model learns. */
  function parameterParts(config) {
    const { L, C, H, K, D, F, V, context_length } = letters(config);
    const gpt = config.family === "GPT";
    return {
      embedding: V * C,
      positions: gpt ? context_length * C : 0n,
      attention: L * (2n * C * H * D + 2n * C * K * D + (gpt ? H * D + 2n * K * D + C : 0n)),
      mlp: L * (mlpMatrices(config) * C * F + (gpt ? F + C : 0n)),
      norms: (2n * L + 1n) * C * (gpt ? 2n : 1n),
      head: config.tied ? 0n : V * C,
    };
  }

  function countParameters(config) {
    return Object.values(parameterParts(config)).reduce((a, b) => a + b);
  }

  /** The weights of the matrices of one layer. */
  function layerMatrices(config) {
    const { C, H, K, D, F } = letters(config);
    return 2n * C * H * D + 2n * C * K * D + mlpMatrices(config) * C * F;
  }

  function forwardFlops(config, B, T, S = T) {
    const { L, C, H, D, V } = letters(config);
    [B, T, S] = [B, T, S].map(BigInt);
    return B * T * (L * (2n * layerMatrices(config) + 4n * S * H * D) + 2n * C * V);
  }

  function scoreBytes(config, B, T, bytesPerElement) {
    const { H } = letters(config);
    [B, T] = [B, T].map(BigInt);
    return B * H * T * T * BigInt(bytesPerElement);
  }

  function kvCacheBytes(config, B, T, bytesPerElement) {
    const { L, K, D } = letters(config);
    return 2n * L * BigInt(B) * BigInt(T) * K * D * BigInt(bytesPerElement);
  }

  /** What the backward pass needs of one layer, and of the end of the model, in elements. */
  function activationParts(config, B, T) {
    const { C, H, D, F, V } = letters(config);
    const kept = config.family === "GPT" ? 2n : 4n;
    [B, T] = [B, T].map(BigInt);
    return {
      layer: B * T * (6n * C + 4n * H * D + kept * F) + 2n * B * H * T * T,
      end: 3n * B * T * (C + V),
    };
  }

  function trainingBytes(config, B, T, bytesPerElement = 4, checkpointing = false) {
    const { L, C, F } = letters(config);
    const { layer, end } = activationParts(config, B, T);
    [B, T] = [B, T].map(BigInt);
    const block = layer + B * T * F;
    const kept = checkpointing ? L * B * T * C + (block > end ? block : end) : L * layer + end;
    const N = countParameters(config), b = BigInt(bytesPerElement);
    const found = { weights: N * b, gradients: N * b, optimizer: 2n * N * b, activations: kept * b };
    return { ...found, total: Object.values(found).reduce((x, y) => x + y) };
  }

  function rooflineSeconds(flops, nBytes, flopsPerSecond, bytesPerSecond) {
    for (const [name, rate] of Object.entries({ flopsPerSecond, bytesPerSecond })) {
      if (!(rate > 0)) throw new RangeError(`${name} must be above 0, got ${rate}`);
    }
    return Math.max(Number(flops) / flopsPerSecond, Number(nBytes) / bytesPerSecond);
  }

  window.costs = {
    SIZES, MODELS, letters, parameterParts, layerMatrices, activationParts,
    countParameters, forwardFlops, scoreBytes, kvCacheBytes, trainingBytes, rooflineSeconds,
  };
})();
