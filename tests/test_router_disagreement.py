"""The script that trains a mixture of experts and counts whose routers choose otherwise."""

import re

import pytest
import router_disagreement

WORDS = b"In the beginning was a text of few words, and it is said again and again. "


@pytest.mark.slow
def test_a_mixture_is_trained_and_compared_with_itself(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers", reason="Hugging Face models need the extra hf")
    monkeypatch.setattr(router_disagreement, "STEPS", 2)
    monkeypatch.setattr(router_disagreement, "TESTED", 8)
    monkeypatch.setattr(router_disagreement, "LENGTH", 32)
    (tmp_path / "text").write_bytes(200 * WORDS)
    router_disagreement.train(tmp_path / "text", tmp_path / "moe")
    assert "1,905,792 parameters" in capsys.readouterr().out
    router_disagreement.compare(tmp_path / "moe")
    heading, *lines = capsys.readouterr().out.splitlines()
    assert "tokens whose experts differ, by layer" in heading
    shares = {line[:22].strip(): [float(number) for number in re.findall(r"([\d.]+)%", line)] for line in lines}
    assert list(shares) == [
        *(name for name in router_disagreement.RUNS if name != "reference"),
        "certified (bfloat16)",
    ]
    assert all(len(own) == 4 for own in shares.values())
    assert shares["the same again"] == [0, 0, 0, 0]
    assert max(shares["bfloat16 throughout"]) > 0
