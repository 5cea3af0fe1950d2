"""Model, layout and job to files."""

from fivefold.interop.format import WrittenConfig
from fivefold.interop.keys import write_values
from fivefold.interop.megacorp.keys import TABLE
from fivefold.interop.render import yaml_file


def emit(plan):
    values = write_values(TABLE, {"job": plan.job, "layout": plan.layout}) | {"megacorp.model": plan.model.name}
    return WrittenConfig({"megacorp.yaml": yaml_file(values, TABLE, about=("megacorp",), extra={})})
