"""Model, layout and job to files."""

from fivefold.interop.format import WrittenConfig
from fivefold.interop.keys import write_values
from fivefold.interop.megacorp.keys import TABLE
from fivefold.interop.render import render_yaml


def emit(plan):
    values = write_values(TABLE, {"job": plan.job, "layout": plan.layout}) | {"megacorp.model": plan.model.name}
    return WrittenConfig({"megacorp.yaml": render_yaml(values, TABLE, about=("megacorp",), extra={})})
