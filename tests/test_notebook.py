"""The notebook of the docs runs from top to bottom, and shows what it says it shows."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    notebook = nbformat.read(ROOT / "docs" / "example.ipynb", 4)
    shipped = [[output.output_type for output in cell.get("outputs", [])] for cell in notebook.cells]
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [[output.output_type for output in cell.get("outputs", [])] for cell in notebook.cells]
    assert shown == shipped
    pictures = [
        output for cell in notebook.cells for output in cell.get("outputs", []) if "image/png" in output.data
    ]
    assert len(pictures) == 2
    assert (tmp_path / "look.html").stat().st_size > 10_000


@pytest.mark.slow
def test_the_audit_of_an_indexer_finds_the_mistake_that_was_made(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    transformers = pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")
    if not hasattr(transformers, "DeepseekV32Config"):
        pytest.skip("this transformers has no DeepSeek-V3.2")
    notebook = nbformat.read(ROOT / "docs" / "audit-indexer.ipynb", 4)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(ROOT / "docs")}}).execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    assert "last allowed key 1 earlier; explains 100.0%" in " ".join(printed.split())
