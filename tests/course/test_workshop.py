"""Kept pieces: a piece that passed works after a restart, in later labs, and nothing of the learner's is lost."""

import os
import pickle
import textwrap

import nbformat
import pytest

import tfmlib.attention
import tfmlib.positions
from tfmlib import pieces
from tfmlib.course import grading, notebooks, workshop
from tfmlib.course.check import examine

from .test_check import MINE, OVERFLOWS, call_check, cell, fresh  # noqa: F401

HEADER = "from tfmlib.course.check import check\nfrom tfmlib.course.workshop import begin\n"


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """A lab's folder, begun; `mine/` lies beside it."""
    folder = tmp_path / "03-attention"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(workshop, "_folder", None)
    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)
    workshop.begin("03-attention")
    return tmp_path


def restarted(folder):
    """What a new kernel finds: the reference, then what was kept."""
    for name in pieces.PIECES:
        pieces.use(pieces.reference(name), name)
    return workshop.load(folder / "mine")


def test_a_piece_that_passed_is_there_after_a_restart(lab, capsys):
    call_check(cell(MINE))
    assert "Kept in `mine/attention.py`" in capsys.readouterr().out
    loaded, problems = restarted(lab)
    assert (loaded, problems) == (["softmax"], [])
    assert pieces.in_use("softmax") is not pieces.reference("softmax")
    assert examine(pieces.in_use("softmax"), "softmax").passed


def test_the_kept_file_is_a_module_that_stands_alone(lab):
    call_check(cell(MINE))
    text = (lab / "mine" / "attention.py").read_text()
    assert "from tfmlib.attention import causal_mask, padding_mask, attention_weights" in text
    assert "softmax" not in text.split("# ---- your pieces ----")[0]
    scope = {}
    exec(text, scope)
    assert examine(scope["softmax"], "softmax").passed


def test_what_did_not_pass_is_not_kept(lab):
    call_check(cell(OVERFLOWS))
    assert not (lab / "mine").exists()


def test_helpers_imports_and_constants_are_kept_with_the_piece(lab):
    scope = cell("import numpy as np\nfrom math import inf as infinity\nSMALLEST = -infinity\nx = torch.ones(2)")
    cell("def biggest(x, dim):\n    assert np.pi > SMALLEST\n    return x.amax(dim, keepdim=True)", scope)
    cell(MINE.replace("x.amax(dim, keepdim=True)", "biggest(x, dim)"), scope)
    assert call_check(scope) == 2.0
    text = (lab / "mine" / "attention.py").read_text()
    assert "import numpy as np" in text
    assert "from math import inf" not in text or "SMALLEST = -infinity" in text
    assert "x = torch.ones(2)" not in text  # a name of the notebook's that only looks like the argument
    assert restarted(lab) == (["softmax"], [])
    assert examine(pieces.in_use("softmax"), "softmax").passed


def test_a_piece_that_passes_again_replaces_its_own_section_only(lab):
    scope = cell(MINE)
    call_check(scope)
    mask = "def causal_mask(T, S=None):\n    S = S or T\n    if T > S: raise ValueError\n"
    cell(mask + "    return torch.ones(T, S).tril(S - T) > 0\n", scope)
    call_check(scope, "causal_mask")
    path = lab / "mine" / "attention.py"
    path.write_text(path.read_text() + "\n# a note of my own\n")
    cell(MINE.replace("e / e.sum", "e * 1.0 / e.sum"), scope)
    call_check(scope)
    text = path.read_text()
    assert "e * 1.0 / e.sum" in text
    assert "tril(S - T) > 0" in text
    assert "# a note of my own" in text
    assert restarted(lab)[0] == ["softmax", "causal_mask"]


def test_helpers_of_the_same_name_do_not_break_a_kept_piece(lab, capsys):
    scope = cell("def top(x, dim):\n    return x.amax(dim, keepdim=True)")
    cell(MINE.replace("x.amax(dim, keepdim=True)", "top(x, dim)"), scope)
    call_check(scope)
    cell("def top(T):\n    return torch.ones(T, T).tril() > 0", scope)
    source = "def causal_mask(T, S=None):\n    S = S or T\n    if T > S: raise ValueError\n    return top(S)[S - T:]\n"
    assert call_check(cell(source, scope), "causal_mask") == 2.0
    assert "it would break your kept `softmax`" in capsys.readouterr().out
    assert restarted(lab)[0] == ["softmax"]
    assert examine(pieces.in_use("softmax"), "softmax").passed


def test_a_kept_file_that_cannot_be_loaded_is_left_alone(lab):
    path = lab / "mine" / "attention.py"
    path.parent.mkdir()
    path.write_text("def softmax(x, dim=-1:\n    pass\n")
    loaded, problems = restarted(lab)
    assert loaded == []
    assert "attention.py line 1 cannot be loaded (SyntaxError" in problems[0]
    assert path.read_text().startswith("def softmax(x, dim=-1:")
    assert pieces.in_use("softmax") is pieces.reference("softmax")
    before = path.read_text()
    assert call_check(cell(MINE)) == 2.0  # points do not depend on it
    assert path.read_text() == before


def test_one_broken_section_does_not_cost_the_others(lab):
    scope = cell(MINE)
    call_check(scope)
    cell("def padding_mask(is_token):\n    return is_token[:, None, None]", scope)
    call_check(scope, "padding_mask")
    path = lab / "mine" / "attention.py"
    path.write_text(path.read_text().replace("def padding_mask", "import no_such_module\ndef padding_mask"))
    loaded, problems = restarted(lab)
    assert loaded == ["softmax"]
    assert "cannot be loaded (ModuleNotFoundError: No module named 'no_such_module')" in problems[0]


def test_a_piece_changed_by_hand_is_judged_again(lab):
    call_check(cell(MINE))
    path = lab / "mine" / "attention.py"
    right = path.read_text()
    path.write_text(right.replace("e / e.sum", "1.0 * e / e.sum"))
    assert restarted(lab) == (["softmax"], [])
    path.write_text(right.replace("e / e.sum(dim, keepdim=True)", "e"))
    loaded, problems = restarted(lab)
    assert loaded == []
    assert "`softmax` was changed since it passed, and does not pass now" in problems[0]
    assert pieces.in_use("softmax") is pieces.reference("softmax")


def test_the_piece_in_use_does_not_change_with_the_notebooks_names(lab):
    scope = cell("K = 1.0")
    cell(MINE.replace("(x -", "(K * x - K *"), scope)
    call_check(scope)
    cell("K = 5.0", scope)
    assert examine(pieces.in_use("softmax"), "softmax").passed
    assert examine(scope["softmax"], "softmax").passed


def test_what_a_learner_adds_to_a_kept_file_stays(lab):
    scope = cell(MINE)
    call_check(scope)
    path = lab / "mine" / "attention.py"
    path.write_text("# my notes\nNUMBER = 3\n" + path.read_text() + "\n# at the end\n")
    cell("def padding_mask(is_token):\n    return is_token[:, None, None]", scope)
    call_check(scope, "padding_mask")
    for line in ("# my notes\n", "NUMBER = 3\n", "# at the end\n"):
        assert line in path.read_text()
    assert restarted(lab) == (["softmax", "padding_mask"], [])


def test_a_cell_that_prepares_something_is_kept_whole(lab):
    source = "rows = []\nrows.append(0.0)\n" + textwrap.dedent(MINE).replace("(x -", "(x + rows[0] -")
    assert call_check(cell(source)) == 2.0
    assert "rows.append(0.0)" in (lab / "mine" / "attention.py").read_text()
    assert restarted(lab) == (["softmax"], [])


def test_a_kept_class_can_be_pickled(lab):
    source = "from torch import Tensor, nn\n" + notebooks.solution_source("MultiHeadAttention")
    scope = cell(source)
    scope.update({n: pieces.reference(n) for n in ("split_heads", "merge_heads", "repeat_kv")})
    scope |= {"attention": tfmlib.attention, "rotary": tfmlib.positions}
    assert call_check(scope, "MultiHeadAttention") == 5.0
    made = pieces.in_use("MultiHeadAttention")
    assert made.__module__ == "mine.heads"
    assert isinstance(pickle.loads(pickle.dumps(made(8, 2))), made)


def test_a_piece_of_a_nested_module_is_kept_in_a_folder(lab, capsys):
    scope = cell("import math\nfrom torch import nn\n" + notebooks.solution_source("init_weights"))
    assert call_check(scope, "init_weights") == 2.0
    assert "Kept in `mine/models/shared.py`" in capsys.readouterr().out
    text = (lab / "mine" / "models" / "shared.py").read_text()
    assert "from tfmlib.models.shared import Sizes, decoder_inputs" in text
    assert restarted(lab) == (["init_weights"], [])
    assert pieces.in_use("init_weights").__module__ == "mine.models.shared"
    assert pickle.loads(pickle.dumps(pieces.in_use("init_weights"))) is pieces.in_use("init_weights")


def test_points_do_not_depend_on_whether_a_piece_can_be_kept(lab, capsys):
    (lab / "mine").write_text("a file where the folder should be")
    assert call_check(cell(MINE)) == 2.0
    assert "It passed, but could not be kept (" in capsys.readouterr().out


def test_a_broken_kept_file_is_named(lab, capsys):
    (lab / "mine").mkdir()
    (lab / "mine" / "attention.py").write_text("x = 1\nx = = 2\n")
    assert call_check(cell(MINE)) == 2.0
    assert "mine/attention.py line 2 cannot be loaded (SyntaxError" in capsys.readouterr().out


def test_a_piece_that_was_never_defined_earns_nothing_and_breaks_nothing(tmp_path):
    """A cell with a syntax error leaves its name undefined: begin() has bound it to the piece in use."""
    run = run_cells(
        tmp_path / "03-attention",
        f"{HEADER}begin('03-attention')",
        "def softmax(x, dim=-1:\n    pass",
        "check(softmax, points=2)",
        "softmax",
    )
    assert len(grading.errors(run)) == 1
    assert "`softmax` is tfmlib's own here" in text_of(run.cells[2])
    assert "function tfmlib.attention.softmax" in text_of(run.cells[3])


def test_an_unknown_lab_is_an_error():
    with pytest.raises(ValueError, match="no lab '3'; the labs are 01-tokens, 02-positions, "):
        workshop.begin("3")


def test_while_nbgrader_grades_nothing_is_loaded_or_kept(lab, monkeypatch):
    call_check(cell(MINE))
    restarted(lab)
    pieces.use(pieces.reference("softmax"), "softmax")
    for step in ("autograde", "validate"):
        monkeypatch.setenv("NBGRADER_EXECUTION", step)
        workshop.begin("03-attention")
        assert pieces.in_use("softmax") is pieces.reference("softmax")
        before = sorted(os.listdir(lab / "mine"))
        call_check(cell("def padding_mask(m): return m[:, None, None]"), "padding_mask")
        assert sorted(os.listdir(lab / "mine")) == before
        pieces.use(pieces.reference("padding_mask"), "padding_mask")


# In real kernels -----------------------------------------------------------------------------------------------------


def run_cells(folder, *sources):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    return grading.run(notebook, folder)


def text_of(cell):
    return "".join(str(o.get("text", "")) + str(o.get("data", {}).get("text/plain", "")) for o in cell.outputs)


def test_lab_04_uses_what_passed_in_lab_03_after_a_restart(tmp_path):
    mine = (
        "import torch\ncalls = []\n"
        "def scaled_dot_product_attention(q, k, v, mask=None):\n"
        "    if mask is not None and mask.dtype != torch.bool:\n        raise TypeError('bool')\n"
        "    s = q @ k.mT / q.shape[-1] ** 0.5\n"
        "    m = torch.ones_like(s, dtype=torch.bool) if mask is None else mask\n"
        "    scaled_dot_product_attention.calls = getattr(scaled_dot_product_attention, 'calls', 0) + 1\n"
        "    return (s.masked_fill(~m, torch.finfo(s.dtype).min).softmax(-1) * m) @ v\n"
    )
    first = run_cells(
        tmp_path / "03-attention",
        f"{HEADER}begin('03-attention')",
        mine,
        "check(scaled_dot_product_attention, points=2)",
    )
    assert grading.errors(first) == []
    assert "2.0" in text_of(first.cells[2])
    second = run_cells(
        tmp_path / "04-heads",
        f"{HEADER}begin('04-heads')\nimport torch\nfrom tfmlib import attention, heads, pieces",
        "heads.MultiHeadAttention(8, 2)(torch.ones(1, 3, 8))",
        "print(attention.scaled_dot_product_attention.calls, attention.scaled_dot_product_attention.__module__)",
    )
    assert grading.errors(second) == []
    assert "your own scaled_dot_product_attention" in text_of(second.cells[0])
    assert text_of(second.cells[2]).strip() == "1 mine.attention"


def test_the_kernel_survives_an_endless_loop_and_an_exit(tmp_path):
    run = run_cells(
        tmp_path / "03-attention",
        f"{HEADER}begin('03-attention')",
        "def softmax(x, dim=-1):\n    while True:\n        pass",
        "check(softmax, points=2)",
        "def causal_mask(T, S=None):\n    exit()",
        "check(causal_mask, points=2)",
        "print('alive')",
    )
    assert "stopped after 10 seconds: does a loop never end?" in text_of(run.cells[2])
    assert "0.0" in text_of(run.cells[4])
    assert text_of(run.cells[5]).strip() == "alive"
