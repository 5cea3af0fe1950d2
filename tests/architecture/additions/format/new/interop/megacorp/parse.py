"""A document to values of the keys."""

from fivefold.interop.format import ParsedConfig
from fivefold.interop.keys import Values, flatten
from fivefold.interop.megacorp.keys import TABLE


def is_megacorp(document):
    return document.kind == "yaml" and "megacorp" in document.values


def parse(document, overrides):
    given = flatten(document.values, origin=document.origin)
    return ParsedConfig(document, Values(TABLE, given, origin=document.origin, software="megacorp", version="7.0"))
