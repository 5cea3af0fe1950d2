"""Rotary position settings of a Hugging Face ``config.json``: base, rotated fraction of the head, and scaling.

Reads both the old keys (``rope_theta``, ``rope_scaling``) and those of transformers 5 (``rope_parameters``).
Source: ``modeling_rope_utils.py`` of transformers 5.23.
"""

from collections.abc import Sequence
from math import log, sqrt
from typing import Any, ClassVar

from pydantic import ConfigDict, Field

from fivefold.bounded_types import Positive, Scalar, Tokens
from fivefold.model.huggingface.config import IGNORE_OTHERS, Config
from fivefold.record import Record

KINDS = {kind: kind for kind in ("linear", "dynamic", "llama3", "yarn", "longrope")}
LAYERS = ("full_attention", "sliding_attention")


class Rotary(Record):
    """The keys of ``rope_scaling`` or ``rope_parameters`` for one kind of layer."""

    model_config: ClassVar[ConfigDict] = IGNORE_OTHERS

    rope_type: str | None = None
    type: str | None = None  # the old name of rope_type
    rope_theta: Positive | None = None
    partial_rotary_factor: Scalar | None = None
    factor: Positive | None = None
    original_max_position_embeddings: Tokens | None = Field(None, gt=1)
    attention_factor: Positive | None = None
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0
    beta_fast: Scalar | None = None
    beta_slow: Scalar | None = None
    mscale: Scalar | None = None
    mscale_all_dim: Scalar | None = None
    truncate: bool = True
    short_factor: tuple[Scalar, ...] = ()
    long_factor: tuple[Scalar, ...] = ()
    llama_4_scaling_beta: Scalar | None = None
    alpha: Positive | None = None
    short_mscale: Positive | None = None
    long_mscale: Positive | None = None

    @property
    def kind(self) -> str:
        """Return the kind of scaling; ``default``: none."""
        return self.rope_type or self.type or "default"


def read_rope(config: Config, *, has_partial_rotary: bool = False, kinds: dict[str, str] = KINDS) -> dict[str, Any]:
    """Return the rotary fields of ``Model`` for a family with equal settings in all layers.

    ``has_partial_rotary``: the family applies ``partial_rotary_factor``; others ignore it, or fail if rope is scaled.
    ``kinds``: the scalings that the family supports, its name → ours.
    """
    given = config.rope_scaling or config.rope_parameters or {}
    if nested := [layers for layers in LAYERS if layers in given]:
        raise config.mistake(
            f"rotary parameters of {nested[0]} only are not read in this family; give them for all layers"
        )
    rotary = Rotary.read(given, origin=f"{config.name}: rope_scaling")
    scaling = _read_scaling(config, rotary, kinds=kinds, original=config.original_max_position_embeddings)
    if not has_partial_rotary:
        return {"rope_theta": rotary.rope_theta or config.rope_theta, **_read_full_heads(config, rotary, scaling)}
    fraction = rotary.partial_rotary_factor
    return {
        "rope_theta": rotary.rope_theta or config.rope_theta,
        "rope_fraction": config.partial_rotary_factor if fraction is None else fraction,
        "rope_scaling": scaling,
    }


def read_table(config: Config) -> Rotary:
    """Return the keys of ``rope_scaling`` or ``rope_parameters`` of a family with equal settings in all layers."""
    return Rotary.read(config.rope_scaling or config.rope_parameters or {}, origin=f"{config.name}: rope_scaling")


def read_temperature(config: Config) -> dict[str, Any]:
    """Return the fields of the factor on rotated queries of Ministral 3: ``llama_4_scaling_beta`` and its steps."""
    rotary = read_table(config)
    scale, floor = rotary.llama_4_scaling_beta, rotary.original_max_position_embeddings
    if scale is None or floor is None:
        raise config.mistake(
            "rope_parameters without llama_4_scaling_beta and original_max_position_embeddings, without which "
            "transformers' code fails; give both, llama_4_scaling_beta=0 for queries without a factor"
        )
    return {"temperature": {"scale": scale, "floor": floor, "rotated": True, "first": 0}}


def read_gemma3_rope(config: Config) -> dict[str, Any]:
    """Return the rotary fields of Gemma 3: sliding layers have their own base; ``rope_scaling`` is for the others."""
    given, scaled = config.rope_parameters or {}, config.rope_scaling or {}
    for key, values in (("rope_parameters", given), ("rope_scaling", scaled)):
        if values and any(layers in values for layers in LAYERS) is not (key == "rope_parameters"):
            scope = "for full_attention and sliding_attention" if key == "rope_parameters" else "for all full layers"
            raise config.mistake(f"{key} gives {', '.join(values)}, which this family does not read; give it {scope}")
    if "type" in scaled and "rope_type" not in scaled:
        raise config.mistake("rope_scaling has the key type, which this family does not read; rename it to rope_type")
    of_full, of_sliding = (given.get(layers) or {} for layers in LAYERS)
    if not isinstance(of_full, dict) or not isinstance(of_sliding, dict):
        raise config.mistake("rope_parameters gives no table for full_attention and sliding_attention")
    flat = of_full | scaled | {"truncate": given.get("truncate", True)}
    full = Rotary.read(flat, origin=f"{config.name}: rope_scaling")
    sliding = Rotary.read(of_sliding, origin=f"{config.name}: sliding_attention")
    if sliding.kind != "default":
        raise config.mistake(f"rope scaling {sliding.kind!r} of the sliding layers is not supported; remove it")
    theta = full.rope_theta or config.rope_theta
    local_theta = sliding.rope_theta or config.rope_local_base_freq
    scaling = _read_scaling(config, full, kinds=KINDS, original=None)
    return {
        "rope_theta": theta,
        "rope_theta_sliding": None if scaling is None and local_theta == theta else local_theta,
        **_read_full_heads(config, full, scaling),
    }


def read_rope_per_layer_type(config: Config, *, slides: tuple[bool, ...]) -> dict[str, Any]:
    """Return the rotary fields of a family with a table, or null for no rotation, per layer type.

    ``slides``: the pattern of sliding layers. A flat table is that of all layers.
    """
    given = config.rope_parameters or config.rope_scaling or {}
    if not any(kind in given for kind in LAYERS):
        return read_rope(config)
    kinds = [LAYERS[sliding] for sliding in (False, True) if sliding in slides]
    for kind in kinds:
        if kind not in given:
            raise config.mistake(f"rope_parameters has no {kind}, and transformers' code fails without it; give it")
    read = {
        kind: read_rope(config.replace(rope_parameters=given[kind], rope_scaling=None))
        for kind in kinds
        if given[kind] is not None
    }
    if not read:
        return {"position": "none", "rope_theta": config.rope_theta}
    fields = read.get(LAYERS[0]) or read[LAYERS[1]]
    if len(read) == 2 and read[LAYERS[1]] != fields:
        if read[LAYERS[1]]["rope_scaling"] is not None:
            raise config.mistake(
                "a rope scaling of the sliding layers that differs from that of the full layers is not supported; give "
                "one"
            )
        fields |= {"rope_theta_sliding": read[LAYERS[1]]["rope_theta"]}
    rotates = tuple(LAYERS[sliding] in read for sliding in slides)
    return fields | {"rope_pattern": () if all(rotates) else rotates}


def read_rope_tables(
    config: Config, *, slides: Sequence[bool], has_partial_rotary: bool = True, kinds: dict[str, str] = KINDS
) -> dict[str, Any]:
    """Return the rotary fields of a family with one rope_parameters table per layer type (full, sliding).

    ``slides``: whether each layer that attends slides. ``has_partial_rotary`` and ``kinds``: as in ``read_rope``.
    """
    tables, read = config.rope_parameters or {}, dict[bool, dict[str, Any]]()
    for sliding in dict.fromkeys(slides):
        if not isinstance(table := tables.get(LAYERS[sliding]), dict):
            raise config.mistake(
                f"rope_parameters has no table of {LAYERS[sliding]}, and transformers' code fails without it; give it"
            )
        read[sliding] = read_rope(
            config.replace(rope_parameters=table, rope_scaling=None), has_partial_rotary=has_partial_rotary, kinds=kinds
        )
    full, sliding_table = read.get(False), read.get(True)
    if full is None or sliding_table is None or full == sliding_table:
        return full or sliding_table or {}
    if sliding_table["rope_scaling"] is not None:
        raise config.mistake(
            "a rope scaling of the sliding layers that differs from that of the full layers is not supported; give one"
        )
    fields = full | {"rope_theta_sliding": sliding_table["rope_theta"]}
    if sliding_table["rope_fraction"] != full["rope_fraction"]:
        fields["sliding"] = {"rope_fraction": sliding_table["rope_fraction"]}
    return fields


def _read_full_heads(config: Config, given: Rotary, scaling: dict[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a family that rotates full heads; ``UserError`` for a partial factor with scaling."""
    fraction = given.partial_rotary_factor
    fraction = config.unread_rotary_factor if fraction is None else fraction
    if scaling is not None and scaling["kind"] != "proportional" and fraction != 1:
        raise config.mistake(
            f"partial_rotary_factor={fraction:g} with rope scaling {scaling['kind']!r}: the family's code rotates "
            "full heads and fails; remove it"
        )
    return {"rope_fraction": 1.0, "rope_scaling": scaling}


def _read_scaling(
    config: Config, given: Rotary, *, kinds: dict[str, str], original: int | None
) -> dict[str, Any] | None:
    """Return the fields of ``RopeScaling``, or None. ``original``: top-level pre-training length; it wins."""
    if given.kind == "default":
        return None
    if given.kind not in kinds:
        raise config.mistake(f"rope scaling {given.kind!r} is not supported; supported: {', '.join(kinds)}")
    kind = kinds[given.kind]
    original = original or given.original_max_position_embeddings
    if original is None or kind == "dynamic":
        original = config.max_position_embeddings
    factor = given.factor
    if factor is None:
        if kind not in ("yarn", "longrope", "proportional"):
            raise config.mistake(f"rope scaling {kind!r} has no factor; give it")
        factor = 1.0 if kind == "proportional" else config.max_position_embeddings / original
    if kind == "llama3" and given.low_freq_factor > given.high_freq_factor:
        low, high = given.low_freq_factor, given.high_freq_factor
        raise config.mistake(f"low_freq_factor={low:g} is more than high_freq_factor={high:g}; swap them")
    return {
        "kind": kind,
        "factor": factor,
        "original_positions": None if kind in ("linear", "proportional") else original,
        **({"fraction": given.partial_rotary_factor or 1.0} if kind == "proportional" else {}),
        "low_frequency_factor": given.low_freq_factor,
        "high_frequency_factor": given.high_freq_factor,
        "beta_fast": given.beta_fast or 32.0,
        "beta_slow": given.beta_slow or 1.0,
        "attention_factor": _read_attention_factor(given, kind=kind, factor=factor, original=original),
        "mscale": given.mscale,
        "mscale_all_dims": given.mscale_all_dim,
        "truncate": given.truncate,
        "short_factors": given.short_factor,
        "long_factors": given.long_factor,
    }


def compute_yarn_mscale(factor: float, *, weight: float = 1.0) -> float:
    """Return YaRN's ``0.1·weight·ln factor + 1``: the factor on q and k for ``factor`` times the trained length."""
    return 0.1 * weight * log(factor) + 1.0 if factor > 1 else 1.0


def _read_attention_factor(given: Rotary, *, kind: str, factor: float, original: int) -> float | None:
    """Return the factor on cos and sin for yarn and longrope, as given or derived from other values; else None."""
    if kind not in ("yarn", "longrope"):
        return None
    if given.attention_factor is not None:
        return given.attention_factor
    if kind == "longrope":
        return sqrt(1 + log(factor) / log(original)) if factor > 1 else 1.0
    if given.mscale and given.mscale_all_dim:
        return compute_yarn_mscale(factor, weight=given.mscale) / compute_yarn_mscale(
            factor, weight=given.mscale_all_dim
        )
    return compute_yarn_mscale(factor)
