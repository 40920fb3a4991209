import torch

from semdiag_models.step import random_state, restore_random_state


def test_the_states_of_an_accelerator_are_saved_and_restored(monkeypatch):
    states = {}
    for name in ("cuda", "mps"):
        backend = getattr(torch, name)
        monkeypatch.setattr(backend, "get_rng_state", lambda *_, name=name: torch.tensor([len(name)]))
        monkeypatch.setattr(backend, "set_rng_state", lambda state, name=name: states.update({name: state}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for name in ("cuda", "mps"):
        saved = random_state(torch.device(name))
        assert set(saved) == {"cpu", name}
        restore_random_state(saved)
        assert torch.equal(states[name], saved[name])
