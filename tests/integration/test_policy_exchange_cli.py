"""Weights out of a run and into one, as the tools that make and use them see it: transformers and PEFT, the real ones."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from exchange_cases import every_dtype
from policy_commands import declared, policy, published, weights
from safetensors.torch import load_file
from torch import nn

from driftline.messages.nats_bus import NatsBus
from driftline.policy_store import HostTensor, JetStreamBlobs, PolicyReader, PolicyWriter, State
from driftline.policy_store.exchange import ModelFolder, write_model

torch.set_num_threads(1)

CONFIG = b'{"model_type": "llama", "bos_token_id": 1}'


def folder_of(path: Path, state: State, *, file_bytes: int = 2**40, config: bytes = CONFIG) -> Path:
    path.mkdir(parents=True)
    write_model(path, {name: tensor.layout for name, tensor in state.items()}, state.__getitem__, file_bytes=file_bytes)
    (path / "config.json").write_bytes(config)
    return path


def same(state: State, folder: Path) -> bool:
    found = ModelFolder.open(folder)
    return {n: t.layout for n, t in state.items()} == dict(found.layouts) and all(np.array_equal(t.data, found.tensor(n).data) for n, t in state.items())


def llama(seed: int = 0) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                         dtype=torch.bfloat16, tie_word_embeddings=True)
    model: nn.Module = LlamaForCausalLM(config).to(torch.bfloat16)
    return model


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12)[None]).logits
    return found


@pytest.mark.parametrize("file_bytes", [2**40, 256])
async def test_every_dtype_goes_in_and_comes_out_bit_for_bit(nats_url: str, fresh_run: str, tmp_path: Path, file_bytes: int) -> None:
    """fp8 and MXFP4 with its scales among them, sharded or not."""
    first, second = every_dtype(0), every_dtype(1)
    taken = await policy("import", folder_of(tmp_path / "a", first, file_bytes=file_bytes), "--run", fresh_run, "--json", url=nats_url)
    assert taken.code == 0, taken
    assert taken.document.keys() == {"run", "version", "digest", "tensors", "bytes_raw", "bytes_stored", "elements_changed", "files"}
    assert taken.document["version"] == 0
    assert taken.document["files"] == ["config.json"]
    out = await policy("export", fresh_run, "head", "-o", tmp_path / "b", "--shard-size", file_bytes, "--json", url=nats_url)
    assert out.code == 0, out
    assert out.document.keys() == {"run", "version", "digest", "folder", "files", "bytes_raw"}
    assert same(first, tmp_path / "b")
    assert sorted(os.listdir(tmp_path / "b")) == sorted(out.document["files"])
    assert (tmp_path / "b" / "config.json").read_bytes() == CONFIG
    assert json.loads((tmp_path / "b" / "generation_config.json").read_bytes())["bos_token_id"] == 1
    again = await policy("import", folder_of(tmp_path / "c", second), "--run", fresh_run, "--as-next", "--version", 1, "--json", url=nats_url)
    assert (again.code, again.document["version"]) == (0, 1), again
    assert (await policy("verify", fresh_run, "--all", url=nats_url)).code == 0
    for version, state in ((0, first), (1, second)):
        got = await policy("get", fresh_run, version, "-o", tmp_path / f"got{version}", url=nats_url)
        assert got.code == 0, got
        assert same(state, tmp_path / f"got{version}")
        assert sorted(os.listdir(tmp_path / f"got{version}")) == ["config.json", "generation_config.json", "model.safetensors"]


async def test_a_version_that_was_taken_home_comes_back_as_the_newest(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    """Rolling back."""
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 4)
    assert (await policy("get", fresh_run, 1, "-o", tmp_path / "v1", url=nats_url)).code == 0
    assert (await policy("import", tmp_path / "v1", "--run", fresh_run, "--as-next", "--version", 4, url=nats_url)).code == 0
    rows = {row["version"]: row for row in (await policy("ls", fresh_run, "--json", url=nats_url)).document["versions"]}
    assert rows[4]["digest"] == rows[1]["digest"] != rows[3]["digest"]
    assert rows[4]["bytes_delta"] < rows[4]["bytes_raw"] / 10
    again = await policy("import", tmp_path / "v1", "--run", fresh_run, "--as-next", "--version", 4, url=nats_url)
    assert again.code == 2
    assert "it would be version 5" in again.err


async def test_transformers_loads_what_was_exported_with_the_same_logits(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = llama()
    model.save_pretrained(tmp_path / "saved")
    assert (await policy("import", tmp_path / "saved", "--run", fresh_run, url=nats_url)).code == 0
    with torch.no_grad():  # a step: one matrix moves by an ulp here and there
        model.model.layers[0].mlp.up_proj.weight.view(torch.int16)[::7] ^= 1
    model.save_pretrained(tmp_path / "stepped")
    stepped = await policy("import", tmp_path / "stepped", "--run", fresh_run, "--as-next", "--json", url=nats_url)
    assert stepped.code == 0, stepped
    shown = (await policy("show", fresh_run, "head", "--json", url=nats_url)).document
    assert shown["kind"] == "delta"
    assert stepped.document["elements_changed"] == 10 * 32
    assert shown["numerics"] == {"imported": "stepped"}
    for version, source in ((0, tmp_path / "saved"), (1, tmp_path / "stepped")):
        done = await policy("export", fresh_run, version, "-o", tmp_path / f"v{version}", "--shard-size", "20KB", url=nats_url)
        assert done.code == 0, done
        assert (tmp_path / f"v{version}" / "model.safetensors.index.json").is_file()
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / f"v{version}", dtype=torch.bfloat16)
        assert torch.equal(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)))
        assert loaded.generation_config.eos_token_id == 2


async def test_a_peft_adapter_goes_in_and_comes_out_as_it_was(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model

    adapted = get_peft_model(llama(), LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    assert (await policy("import", tmp_path / "adapter", "--run", fresh_run, url=nats_url)).code == 0
    names = {tensor["name"] for tensor in (await policy("show", fresh_run, "--json", url=nats_url)).document["tensors"]}
    assert "model.layers.0.self_attn.q_proj.lora_A" in names
    out = await policy("export", fresh_run, "head", "-o", tmp_path / "out", "--json", url=nats_url)
    assert out.code == 0, out
    assert out.document["files"] == ["adapter_model.safetensors", "adapter_config.json"]
    assert (tmp_path / "out" / "adapter_config.json").read_bytes() == (tmp_path / "adapter" / "adapter_config.json").read_bytes()
    before, after = (load_file(tmp_path / folder / "adapter_model.safetensors") for folder in ("adapter", "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(logits(PeftModel.from_pretrained(llama(), tmp_path / "out")), logits(adapted))


async def test_a_policy_with_adapters_leaves_as_an_adapter_or_merged(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    base = llama().float()
    base.save_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "down_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    taken = await policy("import", tmp_path / "adapter", "--onto", tmp_path / "base", "--run", fresh_run, "--json", url=nats_url)
    assert taken.code == 0, taken
    (tmp_path / "adapter" / "adapter_config.json").unlink()
    await drop_adapter_config(nats_url, fresh_run)
    refused = await policy("export", fresh_run, "head", "-o", tmp_path / "alone", url=nats_url)
    assert refused.code == 2
    assert "lora_alpha" in refused.err
    assert (await policy("export", fresh_run, "head", "-o", tmp_path / "alone", "--lora-alpha", 6, "--base", "some/model", url=nats_url)).code == 0
    made = json.loads((tmp_path / "alone" / "adapter_config.json").read_bytes())
    assert (made["r"], made["lora_alpha"], made["target_modules"], made["base_model_name_or_path"]) == (3, 6, ["down_proj", "q_proj"], "some/model")
    want = logits(adapted)
    assert torch.equal(logits(PeftModel.from_pretrained(llama().float(), tmp_path / "alone")), want)
    merged = await policy("export", fresh_run, "head", "-o", tmp_path / "merged", "--merge", "--lora-alpha", 6, url=nats_url)
    assert merged.code == 0, merged
    torch.testing.assert_close(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)), want, rtol=1e-4, atol=1e-5)
    assert not any("lora" in name for name in load_file(tmp_path / "merged" / "model.safetensors"))


async def test_stacked_experts_leave_one_by_one_with_the_scale_of_the_run_s_settings(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    """As K3 holds them: E experts' A and B in one tensor each, their weights apart."""
    rng = np.random.default_rng(0)

    def tensor(*shape: int) -> HostTensor:
        return HostTensor.from_numpy(rng.standard_normal(shape).astype(np.float32))

    experts = "model.layers.0.block_sparse_moe.experts"
    state = {f"{experts}.{n}.w1.weight": tensor(6, 4) for n in range(3)} | {"model.layers.0.q_proj.weight": tensor(5, 4), "model.norm.weight": tensor(4)}
    state |= {f"{experts}.delta.w1.lora_A": tensor(3, 2, 4), f"{experts}.delta.w1.lora_B": tensor(3, 6, 2)}
    state |= {"model.layers.0.q_proj.lora_A": tensor(2, 4), "model.layers.0.q_proj.lora_B": tensor(5, 2)}
    settings = tmp_path / "run.toml"
    settings.write_text(f'[run]\nname = "{fresh_run}"\n[learner]\nlora_rank = 2\nlora_alpha = 5.0\n')
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 1, start=state)
    alone = await policy("export", fresh_run, 0, "-o", tmp_path / "alone", "--run-file", settings, url=nats_url)
    assert alone.code == 0, alone
    adapters = load_file(tmp_path / "alone" / "adapter_model.safetensors")
    assert set(adapters) == {f"base_model.model.{m}.lora_{side}.weight" for m in (*(f"{experts}.{n}.w1" for n in range(3)), "model.layers.0.q_proj") for side in "AB"}
    config = json.loads((tmp_path / "alone" / "adapter_config.json").read_bytes())
    assert (config["r"], config["lora_alpha"], config["target_modules"]) == (2, 5, ["q_proj", "w1"])
    assert "tokenizer.json" in os.listdir(tmp_path / "alone")
    assert "config.json" not in os.listdir(tmp_path / "alone")
    merged = await policy("export", fresh_run, 0, "-o", tmp_path / "merged", "--run-file", settings, "--merge", url=nats_url)
    assert merged.code == 0, merged
    plain = load_file(tmp_path / "merged" / "model.safetensors")
    assert set(plain) == {name for name in state if "lora" not in name}
    a, b = (state[f"{experts}.delta.w1.lora_{side}"].numpy() for side in "AB")
    want = state[f"{experts}.1.w1.weight"].numpy() + b[1] @ a[1] * 2.5
    np.testing.assert_allclose(plain[f"{experts}.1.w1.weight"].numpy(), want, rtol=1e-5, atol=1e-6)


async def test_a_run_s_place_is_said_once_and_found_by_every_command(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    good = folder_of(tmp_path / "good", weights(3))
    (tmp_path / "scratch").mkdir()
    taken = await policy("import", good, "--run", fresh_run, "--store", f"file:{tmp_path / 'bytes'}", "--scratch", tmp_path / "scratch", url=nats_url)
    assert taken.code == 0, taken
    assert os.listdir(tmp_path / "bytes") == [fresh_run]
    assert os.listdir(tmp_path / "scratch") == []
    assert (await policy("verify", fresh_run, url=nats_url)).code == 0
    assert (await policy("export", fresh_run, "head", "-o", tmp_path / "out", url=nats_url)).code == 0
    assert same(weights(3), tmp_path / "out")
    elsewhere = await policy("import", good, "--run", fresh_run, "--as-next", "--store", "jetstream", url=nats_url)
    assert elsewhere.code == 2
    assert "versions are in" in elsewhere.err
    nowhere = await policy("import", good, "--run", fresh_run, "--as-next", "--scratch", tmp_path / "absent", url=nats_url)
    assert nowhere.code == 2
    assert "--scratch" in nowhere.err


async def test_an_old_run_is_not_said_to_be_where_its_versions_are_not(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    """Nothing says where it is; what an import says stays said."""
    from driftline.policy_store.location import located

    good = folder_of(tmp_path / "good", weights(3))
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 2)
        torn = await policy("import", good, "--run", fresh_run, "--as-next", "--store", f"file:{tmp_path / 'elsewhere'}", url=nats_url)
        assert torn.code == 2, torn
        assert "version 1 is not there" in torn.err
        assert await located(bus, fresh_run) is None
        assert (await policy("import", good, "--run", fresh_run, "--as-next", url=nats_url)).code == 0
        said = await located(bus, fresh_run)
        assert said is not None
        assert said.store == "jetstream"


async def drop_adapter_config(url: str, run: str) -> None:
    """As in a run whose learner made the adapters: only its settings know alpha."""
    from driftline.policy_store.model_files import load_files, store_files

    async with await NatsBus.connect(url, name="test") as bus:
        files = await load_files(bus, run)
        del files["adapter_config.json"]
        await store_files(bus, run, files)


async def test_an_adapter_alone_becomes_the_next_version_of_the_weights_that_are_there(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    llama().save_pretrained(tmp_path / "base")
    for number in range(2):
        model = llama()
        torch.manual_seed(number)
        get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)).save_pretrained(tmp_path / f"adapter{number}")
    assert (await policy("import", tmp_path / "adapter0", "--onto", tmp_path / "base", "--run", fresh_run, url=nats_url)).code == 0
    assert (await policy("import", tmp_path / "adapter1", "--run", fresh_run, "--as-next", url=nats_url)).code == 0
    found = (await policy("diff", fresh_run, "0", "1", "--json", url=nats_url)).document
    assert {tensor["name"].rpartition(".")[2] for tensor in found["tensors"]} == {"lora_A", "lora_B"}


REFUSED: list[tuple[list[str], int, list[str]]] = [
    (["NEW", "--as-next"], 2, ["--as-next", "no version yet"]),
    (["NEW", "--version", "3"], 2, ["--version", "version 0"]),
    (["RUN"], 2, ["run", "up to 1", "--as-next"]),
    (["RUN", "--as-next", "--version", "1"], 2, ["--version", "version 2"]),
    (["RUN", "--as-next", "--onto", "DIR"], 2, ["--onto", "adapter"]),
    (["OTHER", "--as-next"], 2, ["OTHER", "no such run"]),
]


async def test_an_import_that_does_not_fit_the_run_is_refused_and_changes_nothing(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    async with declared(nats_url, fresh_run) as bus, declared(nats_url, f"{fresh_run}-new"):
        await published(bus, fresh_run, 2)
        good = folder_of(tmp_path / "good", weights(3))
        for arguments, code, named in REFUSED:
            words = {"NEW": f"{fresh_run}-new", "RUN": fresh_run, "OTHER": f"{fresh_run}-other", "DIR": str(good)}
            run, *rest = [words.get(word, word) for word in arguments]
            said = await policy("import", good, "--run", run, *rest, url=nats_url)
            assert said.code == code, (arguments, said)
            assert not [word for word in named if words.get(word, word) not in said.err.replace("\n", " ")], (arguments, said.err)
        odd = folder_of(tmp_path / "odd", {**weights(3), "more": weights(1)["norm"]})
        other = await policy("import", odd, "--run", fresh_run, "--as-next", url=nats_url)
        assert other.code == 2
        assert "tensor more" in other.err
        assert (await policy("ls", fresh_run, "--json", url=nats_url)).document["head"] == 1
        assert (await policy("import", odd, "--run", fresh_run, "--as-next", "--reshape", url=nats_url)).code == 0
        for name in ("absent", "good/config.json"):
            said = await policy("import", tmp_path / name, "--run", fresh_run, url=nats_url)
            assert said.code == 2, said
        (tmp_path / "good" / "model.safetensors").write_bytes(b"\xff" * 100)
        damaged = await policy("import", good, "--run", fresh_run, "--as-next", url=nats_url)
        assert damaged.code == 1
        assert "model.safetensors" in damaged.err


async def test_an_import_is_refused_while_a_learner_owns_the_run(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    from driftline.services.learner.ownership import Ownership

    good = folder_of(tmp_path / "good", weights(3))
    # A process that lives: of this machine, so nobody has to wait to learn that.
    code = ("import asyncio, sys\nfrom driftline.messages.nats_bus import NatsBus\nfrom driftline.services.learner.ownership import Ownership\n"
            "async def main():\n async with await NatsBus.connect(sys.argv[1], name='learner') as bus:\n  owner = Ownership(bus, sys.argv[2], lease_s=0.5)\n"
            "  await owner.claim()\n  print('mine', flush=True)\n  await owner.keep()\nasyncio.run(main())")
    async with declared(nats_url, fresh_run) as bus:
        await published(bus, fresh_run, 2)
        learner = await asyncio.create_subprocess_exec(sys.executable, "-c", code, nats_url, fresh_run, stdout=asyncio.subprocess.PIPE)
        try:
            assert learner.stdout is not None
            async with asyncio.timeout(60):
                while await learner.stdout.readline() != b"mine\n":
                    assert learner.returncode is None
            said = await policy("import", good, "--run", fresh_run, "--as-next", url=nats_url)
            assert said.code == 1, said
            assert f"process {learner.pid}" in said.err
            assert "stop it first" in said.err
        finally:
            learner.kill()
            await learner.wait()
        assert (await policy("import", good, "--run", fresh_run, "--as-next", url=nats_url)).code == 0
        owner = Ownership(bus, fresh_run, lease_s=30.0)
        assert await owner.claim() == 3  # the import has let go: nobody has to wait for it


async def test_a_writer_that_was_about_to_publish_loses_to_an_import(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    from driftline.messages.errors import HeadConflict

    async with declared(nats_url, fresh_run) as bus:
        states = await published(bus, fresh_run, 2)
        late = PolicyWriter(bus, JetStreamBlobs(bus, fresh_run), fresh_run)
        await late.resume()
        assert (await policy("import", folder_of(tmp_path / "w", weights(3)), "--run", fresh_run, "--as-next", url=nats_url)).code == 0
        with pytest.raises(HeadConflict):
            await late.publish(states[0], version=2, learner_step=2)
        reader = PolicyReader(bus, JetStreamBlobs(bus, fresh_run), fresh_run)
        assert (await reader.manifest(2)).numerics == {"imported": "w"}


async def test_the_byte_level_policy_leaves_with_a_tokenizer_that_gives_its_ids(nats_url: str, fresh_run: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    import driftline
    from driftline.models.tokenizer import ByteTokenizer

    base = Path(driftline.__file__).parent / "models" / "base"
    assert (await policy("import", base, "--run", fresh_run, url=nats_url)).code == 0
    assert (await policy("export", fresh_run, "head", "-o", tmp_path / "out", url=nats_url)).code == 0
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"} == set(os.listdir(tmp_path / "out"))
    theirs = AutoTokenizer.from_pretrained(tmp_path / "out")
    for text in ("spell: driftline\n", "naïve – ünïcode ✓ \x00\t", "".join(map(chr, range(1, 400)))):
        assert theirs.encode(text, add_special_tokens=False) == ByteTokenizer().encode(text)
        assert theirs.decode(theirs.encode(text, add_special_tokens=False)) == text
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (256, 257, 258)
    source, copy = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "out"))
    assert source.keys() == copy.keys()
    assert all(torch.equal(source[name], copy[name]) for name in source)
