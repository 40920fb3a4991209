import hashlib
import math
import os
import pickle
import random
import zipfile
from dataclasses import replace

import pytest
import torch

from semdiag_files import InputError
from semdiag_models.checkpoint import Checkpoint, read_checkpoint, read_plain, sha256, write_checkpoint
from semdiag_models.model import Encoder

HEAD = "head.weight"


@pytest.fixture
def checkpoint(tiny_model, tiny_training):
    return Checkpoint(
        model=tiny_model(attention="topk", k=3),
        training=tiny_training(snapshots=(1, 2)),
        state=Encoder(tiny_model()).state_dict(),
        epoch=2,
        history={"epoch": [1, 2], "train_loss": [0.7, 0.6]},
        rng={"cpu": torch.get_rng_state()},
        provenance={"command": "semdiag train …", "threads": 1},
    )


@pytest.fixture
def path(tmp_path, checkpoint):
    write_checkpoint(tmp_path / "last.pt", checkpoint)
    return tmp_path / "last.pt"


@pytest.fixture
def doctor(path):
    """Call with a function that changes the content of the file."""

    def change(how):
        content = torch.load(path, weights_only=True)
        how(content)
        torch.save(content, path)

    return change


def refusal(path, read=read_checkpoint):
    with pytest.raises(InputError) as refused:
        read(path)
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_what_was_written_is_read_back_bit_for_bit(path, checkpoint):
    back = read_checkpoint(path)
    assert replace(back, state={}, rng={}) == replace(checkpoint, state={}, rng={})
    for written, read in ((checkpoint.state, back.state), (checkpoint.rng, back.rng)):
        assert written.keys() == read.keys()
        assert all(torch.equal(written[name], read[name]) for name in written)


def test_the_built_encoder_computes_what_the_saved_one_did(path, checkpoint):
    model = Encoder(checkpoint.model).eval()
    model.load_state_dict(checkpoint.state)
    tokens = torch.randint(3, (4, 8))
    built = read_checkpoint(path).build()
    assert not built.training
    assert torch.equal(built(tokens), model(tokens))


def test_the_file_has_the_rights_of_any_other_and_is_alone_in_its_folder(path):
    assert list(path.parent.iterdir()) == [path]
    other = path.with_name("other")
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_the_file_is_a_plain_dict_even_of_parameters_and_transposed_views(tmp_path, checkpoint):
    checkpoint.state[HEAD] = torch.nn.Parameter(torch.randn(8, 2)).T
    write_checkpoint(tmp_path / "view.pt", checkpoint)
    content = torch.load(tmp_path / "view.pt", weights_only=True)
    assert content["format"] == "semdiag/1"
    names = {"format", "config", "model_state", "epoch", "history", "rng", "provenance", "weights_sha256"}
    assert set(content) == names
    assert not content["model_state"][HEAD].requires_grad
    assert torch.equal(read_checkpoint(tmp_path / "view.pt").state[HEAD], checkpoint.state[HEAD])


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_while_writing_leaves_the_old_file_and_nothing_else(monkeypatch, path, checkpoint, error):
    before = path.read_bytes()

    def half(content, file):
        file.write(b"half of a checkpoint")
        raise error

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(type(error)):
        write_checkpoint(path, checkpoint)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_memory_that_could_not_be_written_is_given_back(monkeypatch, path, checkpoint):
    """Else Python 3.13 warns when it comes to throw it away."""
    seen = []

    def fail(path, content):
        seen.append(content)
        raise OSError("disk full")

    monkeypatch.setattr("semdiag_models.checkpoint.write_bytes", fail)
    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(path, checkpoint)
    with pytest.raises(ValueError, match="released"):
        len(seen[0])


def test_the_whole_content_is_on_the_disk_before_it_gets_its_name(monkeypatch, tmp_path, checkpoint):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.fstat(fd).st_size, list(tmp_path.glob("*.pt")))))
    write_checkpoint(tmp_path / "last.pt", checkpoint)
    assert synced[0] == ((tmp_path / "last.pt").stat().st_size, [])
    assert [files for _, files in synced] == [[], [tmp_path / "last.pt"]]  # then its name is


def test_a_failure_of_the_last_step_leaves_no_temporary_file(tmp_path, checkpoint):
    (tmp_path / "last.pt").mkdir()
    with pytest.raises(OSError, match=r"last\.pt"):
        write_checkpoint(tmp_path / "last.pt", checkpoint)
    assert [p.name for p in tmp_path.iterdir()] == ["last.pt"]


def test_writing_into_an_absent_folder_is_an_os_error(tmp_path, checkpoint):
    with pytest.raises(FileNotFoundError):
        write_checkpoint(tmp_path / "absent" / "last.pt", checkpoint)


def test_a_truncated_file_is_refused_wherever_it_was_cut(path):
    whole = path.read_bytes()
    for end in {*range(0, len(whole), 101), 1, 2, 4, len(whole) - 1}:
        path.write_bytes(whole[:end])
        assert refusal(path).startswith((" is not a checkpoint, or it is truncated (", " is not a checkpoint: "))


@pytest.mark.slow
def test_damage_anywhere_in_the_structure_is_a_refusal_or_harmless_but_never_a_crash(path):
    whole, dice = path.read_bytes(), random.Random(7)
    end_of_pickle = whole.index(b"PK\x03\x04", 4)
    refusals = []
    for _ in range(400):
        damaged = bytearray(whole)
        damaged[dice.randrange(end_of_pickle)] = dice.randrange(256)
        path.write_bytes(damaged)
        try:
            read_checkpoint(path)
        except InputError as error:
            refusals.append(str(error))
    assert len(refusals) > 100
    assert not any("\n" in message for message in refusals)


class Code:
    """Unpickling this would leave a file behind."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return os.system, (f"touch '{self.trace}'",)


@pytest.mark.parametrize("read", [read_checkpoint, read_plain])
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("container", ["pickle", "zip", "legacy"])
def test_code_is_refused_by_name_and_never_run(path, container, protocol, read):
    trace = path.parent / "executed"
    content = {"format": "semdiag/1", "tensor": torch.zeros(2), "code": Code(trace)}
    if container == "pickle":
        path.write_bytes(pickle.dumps({"code": Code(trace)}, protocol=protocol))
    else:
        zipped = container == "zip"
        torch.save(content, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    assert refusal(path, read).startswith(f" refused: it holds the code object {os.system.__module__}.system,")
    assert not trace.exists()
    if container == "pickle":  # the trap is a real one
        pickle.loads(path.read_bytes())
        assert trace.exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", " is not a checkpoint, or it is truncated (no zip archive as torch.save writes it."),
        (b"garbage", " is not a checkpoint"),
        (bytes(range(256)) * 10, " is not a checkpoint"),
        (b"PK\x03\x04" + bytes(100), " is not a checkpoint, or it is truncated"),
        (pickle.dumps({"format": "semdiag/1"}, protocol=4), " is not a checkpoint, or it is truncated"),
    ],
)
def test_other_files_are_not_checkpoints(path, content, message):
    path.write_bytes(content)
    assert refusal(path).startswith(message)


def test_a_missing_file_and_a_folder_are_named_as_such(tmp_path):
    assert refusal(tmp_path / "absent.pt") == " does not exist."
    assert refusal(tmp_path) == " is a folder, not a file."
    assert "file name too long" in refusal(tmp_path / ("x" * 300))


def test_an_unreadable_file_is_named_as_such(monkeypatch, path):
    def deny(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", deny)  # root, who may run the tests, can read everything
    assert refusal(path) == " cannot be read: permission denied."


@pytest.mark.parametrize("content", [[1, 2], {"state": torch.zeros(2)}, {"format": "semdiag/9"}, torch.zeros(3)])
def test_tensors_of_something_else_are_not_a_semdiag_checkpoint(path, content):
    torch.save(content, path)
    assert refusal(path).startswith(
        " is not a semdiag checkpoint (no format entry 'semdiag/1'). Make one with: semdiag"
    )


def test_plain_tensors_of_something_else_can_be_read_plainly(path):
    torch.save({"weight": torch.arange(3)}, path)
    assert torch.equal(read_plain(path)["weight"], torch.arange(3))


@pytest.mark.parametrize("entry", ["config", "model_state", "epoch", "history", "rng", "provenance"])
def test_an_entry_of_the_wrong_kind_is_named(doctor, path, entry):
    doctor(lambda content: content.update({entry: "x"}))
    assert refusal(path).startswith(f" is damaged: its entry '{entry}' is missing or not a ")


@pytest.mark.parametrize("entry", ["config", "model_state", "epoch", "history"])
def test_a_missing_entry_is_named(doctor, path, entry):
    doctor(lambda content: content.pop(entry))
    assert refusal(path).startswith(f" is damaged: its entry '{entry}' is missing")


def test_random_states_and_provenance_may_be_missing(doctor, path):
    doctor(lambda content: (content.pop("rng"), content.pop("provenance")))
    back = read_checkpoint(path)
    assert back.rng == back.provenance == {}


@pytest.mark.parametrize("key", ["model", "training"])
@pytest.mark.parametrize("value", [3, None])
def test_a_configuration_that_is_no_dict_is_named(doctor, path, key, value):
    doctor(lambda content: content["config"].update({key: value}))
    assert refusal(path) == f" is damaged: its config entry '{key}' is missing or not a dict."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": -1, "history": {}}, "its epoch is negative."),
        ({"history": {"epoch": 3}}, "its history 'epoch' is not a list of numbers."),
        ({"history": {"epoch": [1, "x"]}}, "its history 'epoch' is not a list of numbers."),
        ({"history": {"epoch": [1]}}, "its history 'epoch' does not end at its epoch."),
        (
            {"history": {"train_accuracy": [0.5, 5.0]}},
            "its history 'train_accuracy' has a value that is not between 0 and 1.",
        ),
        (
            {"history": {"holdout_accuracy": [math.nan, 1]}},
            "its history 'holdout_accuracy' has a value that is not between 0 and 1.",
        ),
        (
            {"history": {"train_accuracy": [0, 10**400]}},
            "its history 'train_accuracy' has a value that is not between 0 and 1.",
        ),
    ],
)
def test_an_impossible_history_is_refused(doctor, path, change, message):
    doctor(lambda content: content.update(change))
    assert refusal(path) == f" is damaged: {message}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 10**9}, ": width must lie in [1, 100000]."),
        ({"width": 10**30}, ": width must lie in [1, 100000]."),
        ({"length": 10**9}, ": length must lie in [1, 100000]."),
        ({"vocabulary_size": 10**18}, ": vocabulary_size must lie in [1, 100000]."),
        ({"blocks": 100_000}, " has too few parameters for its configuration's 100000 blocks."),
        (
            {"heads": 100_000, "head_width": 100_000, "width": 100_000, "mlp_width": 100_000},
            " declares a model that would take ",
        ),
        ({"dropout": 10**400}, ": dropout must lie in [0, 1)."),
        ({"blocks": 10**5000}, " is not a checkpoint"),
        ({"k": 9}, ": k must be at most the sequence length. Got k=9, length=8."),
        ({"k": "three"}, ": k must be int | None. Got 'three'."),
        ({"colour": "red"}, ": Unknown ModelConfig field 'colour'."),
        ({7: 7}, ": Unknown ModelConfig field '7'."),
        ({"attention": "entmax"}, ": Unknown attention 'entmax'."),
        ({"attention": "routing", "clusters": 10**6}, ": clusters must lie in [1, 100000]. Got clusters=1000000."),
        (
            {"attention": "routing", "clusters": 100_000, "heads": 100_000, "head_width": 100_000},
            " declares a model that would take",
        ),
        ({"attention": "lsh", "hash_bits": 2**40}, ": hash_bits must lie in [1, 30]."),
        ({"global_tokens": 3}, ": topk attention takes no global_tokens; banded and block do."),
        ({"norm": "both"}, ": Unknown norm 'both'."),
    ],
)
def test_a_hostile_configuration_is_refused_before_anything_is_built(doctor, path, fields, message):
    doctor(lambda content: content["config"]["model"].update(fields))
    assert refusal(path).startswith(message)


def test_a_hostile_amount_of_data_is_refused(doctor, path):
    doctor(lambda content: content["config"]["training"].update(train_samples=10**15))
    assert refusal(path).startswith(": train_samples must lie in [1, 1000000000].")


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.zeros(3, 8), " has shape (3, 8); its configuration says (2, 8)."),
        (torch.zeros(16), " has shape (16,); its configuration says (2, 8)."),
        ([0.0], " has shape list; its configuration says (2, 8)."),
        (torch.zeros(2, 8, dtype=torch.int64), " is not a plain tensor of floating-point numbers."),
        (torch.zeros(2, 8, dtype=torch.complex64), " is not a plain tensor of floating-point numbers."),
        (torch.zeros(1, 1).expand(2, 8), " is not a plain tensor of floating-point numbers."),
    ],
    ids=["rows", "flat", "list", "integers", "complex", "expanded"],
)
def test_a_parameter_that_does_not_fit_is_named(doctor, path, tensor, message):
    doctor(lambda content: content["model_state"].update({HEAD: tensor}))
    assert refusal(path) == f": parameter '{HEAD}'{message}"


def test_a_missing_parameter_is_named(doctor, path):
    doctor(lambda content: content["model_state"].pop(HEAD))
    assert refusal(path) == f" lacks parameter '{HEAD}': it does not fit its configuration."


def test_an_extra_parameter_is_named(doctor, path):
    doctor(lambda content: content["model_state"].update(extra=torch.zeros(1)))
    assert refusal(path) == " has the unexpected parameter 'extra': it does not fit its configuration."


def test_reading_takes_nothing_from_the_global_generator(path):
    before = torch.get_rng_state()
    read_checkpoint(path)
    assert torch.equal(before, torch.get_rng_state())


def test_the_sum_is_that_of_the_bytes(path):
    assert sha256(path) == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("opcode", [b"c", b"(i"])
@pytest.mark.parametrize(
    "name", [b"mod\n" + b"a" * 100_000, b"mod." + b"b." * 50_000 + b"\nx", b"m " * 50_000 + b"\nx"]
)
def test_a_global_whose_name_is_endless_is_refused_at_once(path, opcode, name):
    """Torch looks for its name in the message with a pattern that takes minutes."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + opcode + name + b"\n.")
        archive.writestr("a/version", "3\n")
    assert refusal(path, read_plain).startswith(" refused: it holds the code object m")


ODD = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(4), torch.ones(3)]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "meta": lambda: torch.ones(3, device="meta"),
}


@pytest.mark.filterwarnings("ignore:.*nested tensors.*", "ignore:Sparse.*")
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize(
    "held", [lambda odd: odd, lambda odd: {"a": [{"b": odd}]}, lambda odd: (torch.ones(2), odd)]
)
def test_tensors_that_nothing_here_could_read_are_refused(path, kind, held):
    torch.save(held(ODD[kind]()), path)
    assert refusal(path, read_plain).startswith(f" holds a {kind} tensor; only plain ones are read")
