"""From a model to its spec: known families first, then what can be traced; nothing else moves."""

from __future__ import annotations

from torch import nn

from shuffled_dpsgd.errors import InvalidArgumentError, UnsupportedModuleError
from shuffled_dpsgd.permutation import layers
from shuffled_dpsgd.permutation.blocks import (
    describe_chain,
    describe_layer,
    describe_stream,
    describe_torch_attention,
)
from shuffled_dpsgd.permutation.families import ATTENTION, HEADS, LAYERS, STEMS
from shuffled_dpsgd.permutation.layers import class_name, join
from shuffled_dpsgd.permutation.sketch import Sketch
from shuffled_dpsgd.permutation.spec import SCOPES, Block, PermutationSpec, Scope
from shuffled_dpsgd.permutation.tracing import describe_traced

# Wrappers that call what they wrap and add nothing, with the attribute that holds it.
_WRAPPERS = {
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "peft.tuners.lora.model.LoraModel": "model",
}
# Modules that hand keys and values to attention past its projections, which then must not move.
_FEEDERS = frozenset({"peft.tuners.prefix_tuning.model.PrefixEncoder"})


def discover(model: nn.Module, scope: Scope = "paper") -> PermutationSpec:
    """Find every weight permutation of `model` that provably leaves its function unchanged.

    `scope="paper"` gives Theorems 1-2 (hidden units; query-key dimensions per head; one value
    permutation shared by the heads). `scope="full"` adds per-head value permutations, whole heads
    and the residual stream. The function is the model's logits and loss; what it may also return
    (hidden states, attention maps, caches) moves along. Frozen parameters move like any others.

    Works on the meta device. A parameter no group moves is listed in `unmoved` with the reason;
    a model nothing is known about gives a spec without groups, not an error.
    """
    if scope not in SCOPES:
        raise InvalidArgumentError("scope", expected="'paper' or 'full'", got=scope)
    sketch = Sketch(model, scope)
    if feeder := next((p for p, m in sketch.modules.items() if class_name(m) in _FEEDERS), None):
        sketch.refuse("", f"{feeder} hands keys and values to attention past its projections")
        return sketch.finish()
    for path in sketch.modules:
        try:
            _describe_block(sketch, path)
        except UnsupportedModuleError as error:
            sketch.refuse(path, str(error))
    path, root = _unwrap(model)
    _describe_root(sketch, path, root)
    describe_traced(sketch, path, skip=frozenset({*LAYERS, *STEMS, *HEADS}))
    return sketch.finish()


def _describe_block(sketch: Sketch, path: str) -> None:
    module = sketch.modules[path]
    kind = class_name(module)
    owner = class_name(sketch.modules.get(path.rpartition(".")[0]))
    if kind == ATTENTION and owner.startswith("peft."):
        sketch.refuse(path, f"{owner} adds to its projections in a way that is not described")
        return
    if kind == ATTENTION:
        describe_torch_attention(sketch, path, module)
    elif names := LAYERS.get(kind):
        describe_layer(sketch, path, names)
    for adapter, rank in layers.ranks(path, module).items():
        if sketch.scope == "full":
            name = join(path, f"rank.{adapter}")
            sketch.add("lora-rank", name, sketch.size(rank[0]), [(rank, Block())])


def _describe_root(sketch: Sketch, path: str, root: nn.Module) -> None:
    head = HEADS.get(class_name(root))
    if head is None:
        if class_name(root) in STEMS:
            sketch.note("residual stream: not permuted, it is the model's output")
        elif class_name(root).startswith("transformers."):
            sketch.note(f"residual stream: not permuted, {type(root).__name__} is not described")
        return
    try:
        if sketch.scope == "full":
            for name in (*head.reads, *([head.chain.down] if head.chain else [])):
                for place in sketch.places(join(path, name)):
                    sketch.refuse(place, "runs over classes, whose order is the model's output")
        if head.chain is not None:
            describe_chain(sketch, path, head.chain)
        if sketch.scope == "full":
            stem = STEMS[class_name(sketch.modules[join(path, head.stem)])]
            describe_stream(sketch, path, head, stem, LAYERS)
    except UnsupportedModuleError as error:
        sketch.note(f"residual stream: not permuted, {error}")


def _unwrap(model: nn.Module) -> tuple[str, nn.Module]:
    """The model inside wrappers that only pass calls on, and the path to it."""
    path = ""
    while True:
        kind = class_name(model)
        is_peft = kind.startswith("peft.peft_model.PeftModel")
        name = "base_model" if is_peft else _WRAPPERS.get(kind)
        if name is None:
            return path, model
        model, path = getattr(model, name), join(path, name)
