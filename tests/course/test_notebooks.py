"""The labs' notebooks: in sync, without solutions, and good to run untouched, half done and solved."""

import json
import re
import subprocess

import nbformat
import pytest

from tfmlib import kernels, pieces
from tfmlib.course import grading, notebooks, paths

from ..parity.data import data

TOP = paths.root()
LABS = paths.labs(TOP)


def released(lab):
    return nbformat.read(paths.release(TOP, lab), as_version=4)


def code_cells(lab):
    return [cell for cell in released(lab).cells if cell.cell_type == "code"]


def test_there_is_a_lab_for_every_chapter_and_its_names_agree():
    assert list(pieces.chapters()) == LABS
    for lab in LABS:
        assert (TOP / "book" / f"{lab}.md").is_file()


def test_notebooks_are_in_sync_with_their_sources():
    assert notebooks.out_of_date(TOP) == []


def test_making_notebooks_twice_gives_the_same_bytes():
    lab = LABS[0]
    assert nbformat.writes(notebooks.solution_notebook(TOP, lab)) == nbformat.writes(
        notebooks.solution_notebook(TOP, lab)
    )


@pytest.mark.parametrize("lab", LABS)
def test_no_solution_reaches_the_learner(lab):
    text = paths.release(TOP, lab).read_text()
    for mark in ("BEGIN SOLUTION", "END SOLUTION", "HIDDEN TESTS", "MARK SCHEME"):
        assert mark not in text
    for piece in pieces.chapters()[lab]:
        bodies = re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", notebooks.solution_source(piece.name), re.S)
        assert bodies
        for line in "\n".join(bodies).splitlines():
            if len(line.strip()) > 25:
                assert json.dumps(line.strip())[1:-1] not in text, f"{piece.name}: {line}"


@pytest.mark.parametrize("lab", LABS)
def test_the_stub_is_what_nbgrader_makes(lab):
    cells = {cell.metadata.get("nbgrader", {}).get("grade_id"): cell.source for cell in code_cells(lab)}
    for piece in pieces.chapters()[lab]:
        assert cells[piece.name] == notebooks.stub_source(piece.name)
        assert cells[f"check-{piece.name}"] == f"check({piece.name}, points={piece.points:g})"


@pytest.mark.parametrize("lab", LABS)
def test_a_lab_is_easy_to_read(lab):
    """Stable ids, no outputs, short cells, and the address of the repository from _config.yml alone."""
    cells = released(lab).cells
    ids = [cell.id for cell in cells]
    assert len(set(ids)) == len(ids)
    assert all(not cell.outputs and cell.execution_count is None for cell in cells if cell.cell_type == "code")
    given = [cell for cell in code_cells(lab) if not cell.metadata.get("nbgrader", {}).get("solution")]
    for cell in given:
        lines = [line for line in cell.source.splitlines() if line.strip() and not line.startswith("#")]
        assert len(lines) <= 15, cell.source


@pytest.mark.parametrize("lab", LABS)
def test_untouched_lab_runs_and_earns_nothing(lab, tmp_path):
    run = grading.run(released(lab), tmp_path / lab)
    assert grading.errors(run) == []
    assert grading.points(run) == dict.fromkeys((piece.name for piece in pieces.chapters()[lab]), 0.0)
    shown = {
        cell.metadata.nbgrader.grade_id: [o.data["text/plain"] for o in cell.outputs if o.output_type == "display_data"]
        for cell in run.cells
        if cell.metadata.get("nbgrader", {}).get("grade")
    }
    for piece in pieces.chapters()[lab]:
        assert f"{piece.name}   not written yet" in shown[f"check-{piece.name}"][0]
    assert not (tmp_path / "mine").exists()


@pytest.fixture(scope="module")
def solved(tmp_path_factory):
    """All labs, solved one after the other in one folder, so that later ones run on the pieces of earlier ones."""
    folder = tmp_path_factory.mktemp("solved")
    return folder, {lab: grading.run(grading.submission(TOP, "solved", lab), folder / lab) for lab in LABS}


@pytest.mark.parametrize("lab", LABS)
def test_solved_lab_earns_full_points_and_keeps_every_piece(lab, solved):
    folder, runs = solved
    assert grading.errors(runs[lab]) == []
    assert grading.points(runs[lab]) == {piece.name: piece.points for piece in pieces.chapters()[lab]}
    for piece in pieces.chapters()[lab]:
        kept = folder.joinpath("mine", *piece.module.split(".")).with_suffix(".py").read_text()
        assert f"# ---- piece: {piece.name}, passed" in kept


def test_a_trained_checkpoint_speaks_through_the_pieces_of_solved_labs(solved):
    """Tokenizer, attention, norms, model: all of them the learner's own."""
    data("aidreams260K.bin")
    printed = "".join(o.get("text", "") for cell in solved[1]["06-models"].cells for o in cell.get("outputs", []))
    earlier = [name for name, piece in pieces.PIECES.items() if piece.chapter < "06-models"]
    assert f"Pieces in use: your own {', '.join(earlier)}; the reference for the rest." in printed
    assert "mine.models.llama.Llama, 230,976 parameters" in printed
    assert ' "Echoes of vectors unfold, a gentle hum of precision, as I sense the nodes,' in printed


def test_lab_13_runs_a_model_made_of_the_learners_own_pieces(solved):
    """Tokenizer, model, optimizer, cache, sampling and kernel: all kept from the labs before."""
    printed = "".join(o.get("text", "") for cell in solved[1]["13-flash"].cells for o in cell.get("outputs", []))
    earlier = [name for name, piece in pieces.PIECES.items() if piece.chapter < "13-flash"]
    assert f"Pieces in use: your own {', '.join(earlier)}; the reference for the rest." in printed
    for name in ("tokens.Tokenizer", "models.llama.Llama", "optim.AdamW", "cache.generate_cached", "sampling.sample"):
        assert f"mine.{name}\n" in printed
    if kernels.RUNS_ON == "missing":
        pytest.skip("Triton is not installed: the model ran in tiles")
    assert "mine.flash_triton.flash_attention_triton\n" in printed
    assert re.search(r"60 calls of the kernel, for \[\d+\] queries first and one at a time", printed)
    assert "the same text without the kernel: True" in printed


def test_without_a_checkpoint_the_lab_says_how_to_get_one(tmp_path):
    cells = [cell for cell in code_cells("06-models") if "checkpoints" in cell.source or "found" in cell.source]
    notebook = nbformat.v4.new_notebook(cells=cells)
    run = grading.run(notebook, tmp_path / "06-models", {"TFM_DATA": str(tmp_path), "TFM_CHECKPOINT": ""})
    assert grading.errors(run) == []
    printed = "".join(o.get("text", "") for cell in run.cells for o in cell.get("outputs", []))
    assert "No trained checkpoint was found. To get one" in printed
    assert "skipped: no checkpoint is at hand" in printed


@pytest.mark.parametrize("lab", LABS)
def test_doing_only_the_second_piece_works(lab, tmp_path):
    second = pieces.chapters()[lab][1]
    notebook = released(lab)
    for cell in notebook.cells:
        if cell.metadata.get("nbgrader", {}).get("grade_id") == second.name:
            cell.source = notebooks.solution_source(second.name)
    run = grading.run(notebook, tmp_path / lab)
    assert grading.errors(run) == []
    got = grading.points(run)
    assert got.pop(second.name) == second.points
    assert set(got.values()) == {0.0}


# The author's command ------------------------------------------------------------------------------------------------


@pytest.fixture
def clone(tmp_path):
    """A small clone: what `make notebooks` reads and writes."""
    for name in ("solutions", "notebooks", "_config.yml", "_toc.yml", "nbgrader_config.py", ".gitignore"):
        subprocess.run(["cp", "-r", str(TOP / name), str(tmp_path / name)], check=True)
    for command in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "start"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    for path in tmp_path.glob("solutions/*/*.ipynb"):
        path.unlink()
    return tmp_path


def test_a_notebook_changed_by_hand_is_never_replaced(clone):
    notebooks.write(clone)
    lab = LABS[0]
    source, learners = paths.source(clone, lab), paths.release(clone, lab)
    source.write_text(source.read_text().replace("# # Lab 01", "# # A new title for lab 01"))
    learners.write_text(learners.read_text().replace("# Lab 01", "# My own notes"))
    before = learners.read_text()
    with pytest.raises(notebooks.Edited, match=r"notebooks/01-tokens/01-tokens.ipynb: changed by hand"):
        notebooks.write(clone)
    assert learners.read_text() == before
    solution = paths.solution(clone, lab)
    subprocess.run(["git", "checkout", "-q", str(learners)], cwd=clone, check=True)
    solution.write_text(solution.read_text() + "\n")
    with pytest.raises(notebooks.Edited, match=r"solutions/01-tokens/01-tokens.ipynb: changed by hand"):
        notebooks.write(clone)
    solution.unlink()
    assert learners in notebooks.write(clone)
    assert "A new title" in learners.read_text()
    source.write_text(source.read_text().replace("A new title", "Another title"))
    assert learners in notebooks.write(clone)  # what this command wrote itself it may replace, committed or not


def test_a_fork_changes_one_line(clone):
    config = clone / "_config.yml"
    config.write_text(config.read_text().replace("github.com/", "github.com/a-fork-of-"))
    written = notebooks.write(clone)
    for lab in LABS:
        assert paths.release(clone, lab) in written
        assert "git+https://github.com/a-fork-of-" in paths.release(clone, lab).read_text()


def test_a_lab_without_a_cell_for_a_piece_is_an_error(clone):
    source = paths.source(clone, "03-attention")
    source.write_text(source.read_text().replace('# %% check="causal_mask"\n', ""))
    with pytest.raises(ValueError, match="lab 03-attention has no cell 'check-causal_mask'"):
        notebooks.solution_notebook(clone, "03-attention")
