"""PEFT's adapters, on ordinary and on quantised models: each is exact, or refused by name."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from integrations.tiny_llms import llama, peft, transformers
from shuffled_dpsgd import make_private
from shuffled_dpsgd.clipping import ClippingEngine
from shuffled_dpsgd.core.clip import PlainClipping
from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.integrations.per_sample_loss import next_token_losses
from shuffled_dpsgd.training import compare_weights
from shuffled_dpsgd.training.kinds import check_adapters

pytestmark = pytest.mark.filterwarnings("ignore")

TASK = {"task_type": "CAUSAL_LM"}
TARGETS = TASK | {"target_modules": ["q_proj", "v_proj", "down_proj"]}
ONE = TASK | {"target_modules": ["q_proj"]}
Build = Callable[[], Any]

COMMON: dict[str, Build] = {
    "LoRA": lambda: peft.LoraConfig(r=2, **TARGETS),
    "rsLoRA": lambda: peft.LoraConfig(r=2, use_rslora=True, **TARGETS),
    "DoRA": lambda: peft.LoraConfig(r=2, use_dora=True, **TARGETS),
    "PiSSA": lambda: peft.LoraConfig(r=2, init_lora_weights="pissa", **TARGETS),
    "LoRA with trained tokens": lambda: peft.LoraConfig(
        r=2, trainable_token_indices={"embed_tokens": [2, 3]}, **TARGETS
    ),
    "LoRA with a whole head": lambda: peft.LoraConfig(r=2, modules_to_save=["lm_head"], **TARGETS),
    "VeRA": lambda: peft.VeraConfig(r=4, **ONE),
    "IA3": lambda: peft.IA3Config(feedforward_modules=["down_proj"], **TARGETS),
    "AdaLoRA": lambda: peft.AdaLoraConfig(init_r=4, target_r=2, total_step=10, **TARGETS),
    "LoHa": lambda: peft.LoHaConfig(r=2, **TARGETS),
    "LoKr": lambda: peft.LoKrConfig(r=2, **TARGETS),
    "OFT": lambda: peft.OFTConfig(oft_block_size=4, **TARGETS),
}
OTHERS: dict[str, Build] = {
    "OLoRA": lambda: peft.LoraConfig(r=2, init_lora_weights="olora", **TARGETS),
    "LoRA with biases": lambda: peft.LoraConfig(r=2, lora_bias=True, bias="all", **TARGETS),
    "QALoRA": lambda: peft.LoraConfig(r=2, use_qalora=True, qalora_group_size=4, **TARGETS),
    "BOFT": lambda: peft.BOFTConfig(boft_block_size=4, **TARGETS),
    "FourierFT": lambda: peft.FourierFTConfig(n_frequency=10, **TARGETS),
    "LN tuning": lambda: peft.LNTuningConfig(**TASK),
    "HRA": lambda: peft.HRAConfig(r=2, **TARGETS),
    "MiSS": lambda: peft.MissConfig(r=2, **TARGETS),
    "RandLoRA": lambda: peft.RandLoraConfig(r=2, **ONE),
    "RoAd": lambda: peft.RoadConfig(group_size=8, **TARGETS),
    "trainable tokens": lambda: peft.TrainableTokensConfig(
        target_modules=["embed_tokens"], token_indices=[2, 3], **TASK
    ),
    "HiRA": lambda: peft.HiraConfig(r=2, **TARGETS),
    "SHiRA": lambda: peft.ShiraConfig(r=2, **TARGETS),
    "C3A": lambda: peft.C3AConfig(block_size=8, **TARGETS),
    "WaveFT": lambda: peft.WaveFTConfig(n_frequency=10, **TARGETS),
    "DeLoRA": lambda: peft.DeloraConfig(r=2, **TARGETS),
    "GraLoRA": lambda: peft.GraloraConfig(r=4, gralora_k=2, **TARGETS),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=2, **TASK),
    "BEFT": lambda: peft.BeftConfig(**TARGETS),
    "FRoD": lambda: peft.FrodConfig(**TARGETS),
    "PSOFT": lambda: peft.PsoftConfig(r=2, **TARGETS),
    "SuperTuning": lambda: peft.SupertuningConfig(**TARGETS),
    "DEFT": lambda: peft.DeftConfig(r=2, **TARGETS),
    "pVeRA": lambda: peft.PveraConfig(r=2, **TARGETS),
    "Shadow": lambda: peft.ShadowConfig(**TASK),
}
# These draw random numbers in training, and compute in float32 whatever the model is in.
RANDOM, ROUGH = {"pVeRA", "Shadow"}, {"DEFT", "Shadow"}
REFUSED: dict[str, Build] = {
    "Lily": lambda: peft.LilyConfig(r=2, **TARGETS),
    "GLoRA": lambda: peft.GloraConfig(r=2, **TARGETS),
    "TinyLoRA": lambda: peft.TinyLoraConfig(r=2, **TARGETS),
    "PEANuT": lambda: peft.PeanutConfig(r=2, **TARGETS),
    "AdaMSS": lambda: peft.AdamssConfig(r=2, **TARGETS),
    "UniLoRA": lambda: peft.UniLoraConfig(r=2, **TARGETS),
    "multitask prompt tuning": lambda: peft.MultitaskPromptTuningConfig(
        num_virtual_tokens=2, num_tasks=2, **TASK
    ),
    "OSF": lambda: peft.OSFConfig(**TARGETS),
    "CPT": lambda: peft.CPTConfig(
        cpt_token_ids=[2, 3], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 1], **TASK
    ),
    "aLoRA": lambda: peft.LoraConfig(r=2, alora_invocation_tokens=[3], **TARGETS),
    "target parameters": lambda: peft.LoraConfig(
        r=2, target_modules=[], target_parameters=["q_proj.weight"], **TASK
    ),
    "VBLoRA": lambda: peft.VBLoRAConfig(r=2, num_vectors=10, vector_length=4, topk=2, **TARGETS),
    "adaption prompt": lambda: peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1, **TASK),
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=2, **TASK),
    "p-tuning": lambda: peft.PromptEncoderConfig(
        num_virtual_tokens=2, encoder_hidden_size=8, **TASK
    ),
}


def adapted(build: Build, base: Any = None) -> Any:
    """A model in training with adapters that are not at their start, where many gradients are 0."""
    model = peft.get_peft_model(llama() if base is None else base, build())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.train()


def losses(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids, use_cache=False).logits
    return next_token_losses(logits[:, -ids.shape[1] :], ids)


def token_ids() -> Tensor:
    return torch.randint(0, 12, (4, 7), generator=torch.Generator().manual_seed(1))


def assert_exact(model: Any, *, rtol: float) -> None:
    """The engine's clipped sum is that of the definition, one sample at a time."""
    ids = token_ids()
    oracle = PlainClipping(model, clip_norm=0.02)
    for row in ids:
        oracle.add(losses(model, row[None])[0])
    engine = ClippingEngine(model, clip_norm=0.02)
    with engine:
        engine.backward(losses(model, ids))
    got, expected = engine.clipped_sum(), oracle.clipped_sum()
    torch.testing.assert_close(
        engine.sample_norms.double(), oracle.sample_norms.double(), rtol=rtol, atol=0
    )
    whole = torch.stack([each.norm() for each in expected.values()]).norm()
    assert whole > 0
    for name, each in expected.items():
        assert (got[name] - each).norm() <= rtol * whole, name


@pytest.mark.parametrize(
    "name", [*COMMON, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_adapters_are_exact(name: str) -> None:
    model = adapted((COMMON | OTHERS)[name])
    check_adapters(model)
    if name in RANDOM:
        model.eval()
    if name in ROUGH:
        assert_exact(model, rtol=1e-4)
    else:
        assert_exact(model.double(), rtol=1e-9)


def test_every_kind_of_adapter_has_been_decided_on() -> None:
    """A new release of PEFT with another kind fails here."""
    tried = {build().peft_type for build in (COMMON | OTHERS | REFUSED).values()}
    for kind in {*peft.PeftType} - tried:
        stub = nn.Linear(1, 1)
        stub.peft_config = {"default": types.SimpleNamespace(peft_type=kind)}
        with pytest.raises(InvalidArgumentError, match=f"{kind.name}"):
            check_adapters(stub)


@pytest.mark.parametrize("build", REFUSED.values(), ids=REFUSED)
def test_other_adapters_are_refused_by_name_before_anything_is_spent(build: Build) -> None:
    model = adapted(build)
    kind = str(next(iter(model.peft_config.values())).peft_type).rpartition(".")[2]

    def begin() -> None:
        check_adapters(model)
        with ClippingEngine(model) as engine:
            engine.backward(losses(model, token_ids()))

    with pytest.raises((InvalidArgumentError, UnsupportedModuleError)) as refused:
        begin()
    assert kind in str(refused.value) or "default" in str(refused.value)


def quantised(bits: int, folder: Path, threshold: float = 0.0) -> Any:
    """A tiny Llama, loaded in so many bits on the CPU."""
    pytest.importorskip("bitsandbytes")
    llama(hidden_size=64).save_pretrained(folder)
    config = (
        transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
        if bits == 4
        else transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)
    )
    return transformers.LlamaForCausalLM.from_pretrained(
        folder, quantization_config=config, device_map="cpu", dtype=torch.float32
    )


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("checkpointing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_adapters_on_a_quantised_model_are_exact(
    tmp_path: Path, bits: int, checkpointing: bool
) -> None:
    base = quantised(bits, tmp_path)
    if checkpointing:
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        base.enable_input_require_grads()
    model = adapted(COMMON["LoRA"], base)
    frozen = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    assert_exact(model, rtol=2e-5)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad or torch.equal(parameter, frozen[name]), name
        assert parameter.grad is None or not parameter.grad.any(), name


def test_adapters_on_a_model_that_torchao_quantised_train_privately() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    base = llama(hidden_size=64).requires_grad_(False)
    torchao.quantize_(base.model, torchao.Int8WeightOnlyConfig())
    model = adapted(COMMON["LoRA"], base)
    assert_exact(model, rtol=2e-5)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    private = make_private(
        model,
        optimizer,
        dataset_size=20,
        expected_batch_size=5,
        num_steps=2,
        noise_multiplier=1.0,
        delta=1e-3,
        shuffle="off",
        loss=lambda model, batch: losses(model, batch[0]),
    )
    for (ids,) in private.batches(torch.utils.data.TensorDataset(token_ids().repeat(5, 1))):
        private.backward(losses(model, ids))
        private.step()
    private.release()
    compare_weights({"weights": private.card().weights}, model)


def test_four_bits_packed_for_inference_are_refused(tmp_path: Path) -> None:
    """On CPUs that can, bitsandbytes packs in evaluation mode; no gradient comes through."""
    model = adapted(COMMON["LoRA"], quantised(4, tmp_path))
    layer = model.get_submodule("base_model.model.model.layers.0.self_attn.k_proj")
    ClippingEngine(model)
    assert layer.support_avx512bf16_for_cpu is False
    layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(UnsupportedModuleError, match=r"k_proj.*packed for inference"):
        ClippingEngine(model)


def test_eight_bits_with_a_threshold_are_refused(tmp_path: Path) -> None:
    """One sample's large value changes what bitsandbytes computes for the others."""
    layer = quantised(8, tmp_path, threshold=6.0).model.layers[0].self_attn.k_proj.eval()
    one = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    other = one.clone()
    other[1:, 5] = 20.0
    assert not torch.equal(layer(one)[0], layer(other)[0])
    model = adapted(COMMON["LoRA"], quantised(8, tmp_path, threshold=6.0))
    with pytest.raises(UnsupportedModuleError, match=r"q_proj.*llm_int8_threshold=6\.0"):
        ClippingEngine(model)
