"""Rewrites JSON schemas, because llguidance refuses some schemas needlessly.

llguidance ignores keywords that JSON Schema does not define. But llguidance refuses an unknown `format`, an unknown
dialect, and some keywords whose values allow everything. This module removes the refused formats, dialects and
keywords. The keyword `propertyNames` is not supported by llguidance. `oneOf` is supported only if llguidance can prove
that no value is valid for two of its schemas. Where possible, this module replaces `propertyNames` and `oneOf` with
other keywords. Other unsupported keywords remain in the schema, and llguidance's error message names them.
"""

import json
import re
from collections.abc import Iterator
from itertools import chain, count
from types import NoneType
from typing import Any
from urllib.parse import quote, unquote

# keywords whose values are schemas, lists of schemas, or maps to schemas; the values of all other keywords are data
SCHEMAS = (
    *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
LISTS = "allOf", "anyOf", "items", "oneOf", "prefixItems"
MAPS = "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"

# formats of JSON Schema since draft 4; other formats, such as "path" and "int32", are notes for readers
FORMATS = {
    *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri"),
    *("iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference"),
    *("uri-template", "uuid"),
}
# values with which a keyword allows everything
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
# keyword -> other keywords; without any of these, the keyword has no effect
PARTNERS = {
    "else": ("if",),
    "if": ("then", "else"),
    "maxContains": ("contains",),
    "minContains": ("contains",),
    "then": ("if",),
}
DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[3-7]|draft/(?:2019-09|2020-12|next))/schema#?")
# the keywords that can constrain a string, except `type`
OF_STRINGS = (
    *("$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "const", "else", "enum", "format", "if", "maxLength"),
    *("minLength", "not", "oneOf", "pattern", "then"),
)
MAX_REFERENCES = 100  # longest chain of references that is followed
LOOK_AROUND = re.compile(r"\(\?<?[=!]")


def for_llguidance(schema: str) -> str:
    """Rewrite a schema for llguidance.

    Raises ValueError if a reference is circular, if `propertyNames` can't be replaced, or if the nesting is too deep.
    """
    try:
        root = json.loads(schema)
        seen: dict[int, Any] = {}  # rewritten schemas by `id`; this dict keeps them alive, so that no `id` is reused
        unseen = [(root, root)]
        while unseen:
            schema_node, resource = unseen.pop()
            if not isinstance(schema_node, dict) or id(schema_node) in seen:
                continue
            seen[id(schema_node)] = schema_node
            if isinstance(schema_node.get("$id"), str) and not schema_node["$id"].startswith("#"):
                resource = schema_node  # within this schema, "#" refers to this schema
            _rewrite(schema_node, resource)
            unseen += [(inner, resource) for inner in _subschemas(schema_node, resource)]
        return json.dumps(root)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def _subschemas(schema: dict[str, Any], resource: dict[str, Any]) -> Iterator[Any]:
    for name, value in schema.items():
        if name in MAPS and isinstance(value, dict):
            yield from value.values()
        elif name in LISTS and isinstance(value, list):
            yield from value
        elif name in SCHEMAS:
            yield value
        elif name == "$ref":
            yield referred(value, resource)  # the target may be where the other keywords do not lead


def referred(reference: Any, resource: Any) -> Any:
    """Return the target of "#" or of a JSON pointer, such as "#/$defs/Item". If there is no target, return None."""
    if not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
        return None
    target = resource
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and key.isdecimal() and int(key) < len(target):
            target = target[int(key)]
        else:
            target = target.get(key) if isinstance(target, dict) else None
    return target


def _rewrite(schema: dict[str, Any], resource: dict[str, Any]) -> None:
    if isinstance(dialect := schema.get("$schema"), str):
        del schema["$schema"]  # without `$schema`, the newest dialect applies
        if known := DIALECT.fullmatch(dialect):
            scheme = "http" if known[1].startswith("draft-0") else "https"
            schema["$schema"] = f"{scheme}://json-schema.org/{known[1]}/schema"
    if _is_annotation(schema.get("format")):
        del schema["format"]
    # llguidance refuses dynamic references; without such references, $dynamicAnchor equals $anchor, and
    # $recursiveAnchor has no effect
    if isinstance(anchor := schema.pop("$dynamicAnchor", None), str):
        schema.setdefault("$anchor", anchor)
    schema.pop("$recursiveAnchor", None)
    for name in [*schema]:
        is_alone = name in PARTNERS and schema.keys().isdisjoint(PARTNERS[name])
        if is_alone or schema[name] in NEUTRAL.get(name, ()):
            del schema[name]
    if isinstance(reference := schema.get("$ref"), str):
        schema["$ref"] = quote(reference, safe="!#$%&'()*+,-./:;=?@_~")  # a name may be "Page<Item>"
        if _is_loop(schema, resource):
            raise ValueError(f"$ref={reference!r:.80}: refers to itself")
    # drop alternatives with look-around, which llguidance refuses; answers that fit other alternatives are valid, too
    if isinstance(alternatives := schema.get("anyOf"), list) and (
        possible := [x for x in alternatives if not _looks_around(x)]
    ):
        schema["anyOf"] = possible
    if "anyOf" not in schema and _are_disjoint(schema.get("oneOf"), schema.get("discriminator"), resource):
        schema["anyOf"] = schema.pop("oneOf")
    if "propertyNames" in schema:
        names = schema.pop("propertyNames")
        if _allows_type(schema, "object"):
            _restrict_names(schema, names, resource)


def _is_annotation(format_name: Any) -> bool:
    return isinstance(format_name, str) and format_name not in FORMATS


def _looks_around(schema: Any) -> bool:
    pattern = schema.get("pattern") if isinstance(schema, dict) else None
    return isinstance(pattern, str) and LOOK_AROUND.search(pattern) is not None


def _are_disjoint(schemas: Any, discriminator: Any, resource: dict[str, Any]) -> bool:
    """Return True if types and constants show that no value is valid for two of the given schemas.

    If OpenAPI's `discriminator` names a property whose values tell objects apart, make this property required.
    """
    by_type: dict[str, list[dict[str, Any]]] = {}
    for schema in schemas if isinstance(schemas, list) else [None]:
        resolved = _resolved(schema, resource)
        if (types := _types(resolved)) is None:
            return False
        for name in types:
            by_type.setdefault(name, []).append(resolved)
    tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    return all(
        len(group) == 1 or _differ(group) or (name == "object" and _are_told_apart(group, tag, resource))
        for name, group in by_type.items()
    )


def _are_told_apart(objects: list[dict[str, Any]], tag: Any, resource: dict[str, Any]) -> bool:
    """If a property has different values in all given schemas, make the property required, and return True."""
    properties = [schema["properties"] if isinstance(schema.get("properties"), dict) else {} for schema in objects]
    required = [schema["required"] if isinstance(schema.get("required"), list) else [] for schema in objects]
    for name in properties[0]:
        is_there = name == tag or all(name in names for names in required)
        if is_there and _differ([_resolved(x.get(name), resource) for x in properties]):
            for schema, names in zip(objects, required):
                schema["required"] = names if name in names else [*names, name]
            return True
    return False


def _differ(schemas: list[Any]) -> bool:
    """Return True if every schema lists its valid values, and if no value is in two lists."""
    value_sets = [_values(schema) for schema in schemas]
    return None not in value_sets and len({*chain(*filter(None, value_sets))}) == sum(
        len(values or ()) for values in value_sets
    )


def _values(schema: Any) -> set[tuple[type, Any]] | None:
    """Return the values of `const` or `enum`, as pairs (type, value)."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, (str, int, NoneType)) for value in values):
        return None
    return {(type(value), value) for value in values}


def _types(schema: Any) -> set[str] | None:
    """Return the types of the values that a schema allows.

    Integers are "number". If the schema does not list types, return None.
    """
    if (values := _values(schema)) is not None:
        return {{str: "string", bool: "boolean", int: "number", NoneType: "null"}[kind] for kind, _ in values}
    types = schema.get("type") if isinstance(schema, dict) else None
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        return None
    return {"number" if name == "integer" else name for name in types}


def _resolved(schema: Any, resource: dict[str, Any]) -> Any:
    """Follow a schema's references. Return the last target, or None if the last target is unknown."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = referred(schema["$ref"], resource)
        if isinstance(schema, dict) and "$id" in schema and schema is not resource:  # its "#" refers to itself
            return None
    return None


def _is_loop(schema: Any, resource: dict[str, Any]) -> bool:
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return False
        schema = referred(schema["$ref"], resource)
    return True


def _allows_type(schema: dict[str, Any], name: str) -> bool:
    types = schema.get("type", name)
    return name == types or (isinstance(types, list) and name in types)


def _restrict_names(schema: dict[str, Any], names: Any, resource: dict[str, Any]) -> None:
    """Allow only properties whose names are valid for the schema `names`."""
    properties, value = schema.get("properties", {}), schema.get("additionalProperties", True)
    allowed = _allowed_strings(names, resource)
    if allowed is None or not isinstance(properties, dict):
        return
    if schema.get("patternProperties"):
        raise ValueError("propertyNames: is not supported with 'patternProperties'")
    schema["additionalProperties"] = False
    if isinstance(allowed, str):
        if properties:
            raise ValueError("propertyNames: with 'properties', only 'enum' and 'const' are supported")
        if value is not False:
            schema["patternProperties"] = {allowed: value}
        return
    schema["properties"] = {name: subschema for name, subschema in properties.items() if name in allowed}
    if value is not False and (unnamed := [name for name in allowed if name not in properties]):
        # these properties refer to one schema, because copies of the schema could be too long
        place = next(name for i in count(len(resource)) if (name := f"x-value-{i}") not in resource)
        resource[place] = value
        schema["properties"] |= {name: {"$ref": f"#/{place}"} for name in unnamed}


def _allowed_strings(schema: Any, resource: dict[str, Any]) -> str | dict[str, None] | None:
    """Return the strings that a schema allows, as a pattern or as the keys of a dict. None means all strings."""
    rules = _rules(schema)
    for _ in range(MAX_REFERENCES):
        if [*rules] == ["$ref"] and isinstance(target := referred(rules["$ref"], resource), (dict, bool)):
            schema, rules = target, _rules(target)
    if schema is False or (isinstance(schema, dict) and not _allows_type(schema, "string")):
        return {}
    if not rules:
        return None
    alternatives = rules["anyOf"] if [*rules] == ["anyOf"] else [schema]
    lists = [*map(_listed, alternatives)] if isinstance(alternatives, list) else [None]
    if None not in lists:
        return dict.fromkeys(name for names in lists for name in names or ())
    if [*rules] == ["pattern"] and isinstance(rules["pattern"], str):
        return rules["pattern"]
    if rules.keys() <= {"maxLength", "minLength"} and all(type(length) is int for length in rules.values()):
        return rf"^[\s\S]{{{rules.get('minLength', 0)},{rules.get('maxLength', '')}}}$"
    expected = "'enum', 'const', an 'anyOf' of these, 'pattern', or 'minLength' and 'maxLength'"
    raise ValueError(f"propertyNames: {[*rules]} is not supported there; it may have {expected}")


def _rules(schema: Any) -> dict[str, Any]:
    """Return the keywords of a schema that constrain strings. `type` is not included."""
    rules = {name: schema[name] for name in OF_STRINGS if name in schema} if isinstance(schema, dict) else {}
    return {name: value for name, value in rules.items() if not (name == "format" and _is_annotation(value))}


def _listed(schema: Any) -> list[str] | None:
    """Return the strings of `enum` or `const`. If another keyword also constrains strings, return None."""
    rules = _rules(schema)
    values = [rules["const"]] if [*rules] == ["const"] else rules["enum"] if [*rules] == ["enum"] else None
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else None
