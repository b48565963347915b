"""What llguidance refuses in JSON schemas, although it does not constrain the answer, or can be said otherwise.

Keywords that JSON Schema does not define are annotations, and llguidance ignores them. It does not ignore a `format`
that JSON Schema does not define, a constraint that allows everything, and a dialect that it does not know. It has no
`propertyNames`, and `oneOf` only where it sees that no value can be valid by two of the schemas. A constraint that
remains and that it can't do, it refuses by its name.
"""

import json
import re
from collections.abc import Iterator
from itertools import chain, count
from types import NoneType
from typing import Any
from urllib.parse import quote, unquote

# where a schema has others; all further values, such as those of `enum` and `default`, are data
SCHEMAS = (
    *("additionalItems", "additionalProperties", "contains", "contentSchema", "else", "if", "items", "not"),
    *("propertyNames", "then", "unevaluatedItems", "unevaluatedProperties"),
)
LISTS = "allOf", "anyOf", "items", "oneOf", "prefixItems"
MAPS = "$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"

# of JSON Schema's drafts from 4 on; others, such as "path" and "int32", are notes to whoever reads the schema
FORMATS = {
    *("date", "date-time", "duration", "email", "hostname", "idn-email", "idn-hostname", "ipv4", "ipv6", "iri"),
    *("iri-reference", "json-pointer", "regex", "relative-json-pointer", "time", "uri", "uri-reference"),
    *("uri-template", "uuid"),
}
# values with which a constraint allows everything
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "not": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
# keywords that do nothing unless the schema has one of these, too
PARTNERS = {
    "else": ("if",),
    "if": ("then", "else"),
    "maxContains": ("contains",),
    "minContains": ("contains",),
    "then": ("if",),
}
DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[3-7]|draft/(?:2019-09|2020-12|next))/schema#?")
# what may constrain a string, besides its type
OF_STRINGS = (
    *("$dynamicRef", "$recursiveRef", "$ref", "allOf", "anyOf", "const", "else", "enum", "format", "if", "maxLength"),
    *("minLength", "not", "oneOf", "pattern", "then"),
)
MAX_REFERENCES = 100  # that follow each other
LOOK_AROUND = re.compile(r"\(\?<?[=!]")


def for_llguidance(schema: str) -> str:
    """The same schema in the keywords of llguidance. ValueError for `propertyNames` that these can't express."""
    try:
        root = json.loads(schema)
        seen: dict[int, Any] = {}  # by id: the schemas that were rewritten, which keeps their ids in use
        unseen = [(root, root)]
        while unseen:
            own, resource = unseen.pop()
            if not isinstance(own, dict) or id(own) in seen:
                continue
            seen[id(own)] = own
            if isinstance(own.get("$id"), str) and not own["$id"].startswith("#"):
                resource = own  # within it, "#" is this schema
            _rewrite(own, resource)
            unseen += [(inner, resource) for inner in _subschemas(own, resource)]
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
            yield referred(value, resource)  # it may stand where no schema is expected


def referred(reference: Any, resource: Any) -> Any:
    """What "#" or a JSON pointer such as "#/$defs/Item" refers to; None for others, and where nothing is."""
    if not (isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))):
        return None
    found = resource
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdecimal() and int(key) < len(found):
            found = found[int(key)]
        else:
            found = found.get(key) if isinstance(found, dict) else None
    return found


def _rewrite(schema: dict[str, Any], resource: dict[str, Any]) -> None:
    if isinstance(dialect := schema.get("$schema"), str):
        del schema["$schema"]  # the newest dialect, unless it is a known one
        if known := DIALECT.fullmatch(dialect):
            scheme = "http" if known[1].startswith("draft-0") else "https"
            schema["$schema"] = f"{scheme}://json-schema.org/{known[1]}/schema"
    if _is_annotation(schema.get("format")):
        del schema["format"]
    # without dynamic references, which llguidance refuses, the first is an anchor, and the second nothing
    if isinstance(anchor := schema.pop("$dynamicAnchor", None), str):
        schema.setdefault("$anchor", anchor)
    schema.pop("$recursiveAnchor", None)
    for name in [*schema]:
        is_alone = name in PARTNERS and schema.keys().isdisjoint(PARTNERS[name])
        if is_alone or schema[name] in NEUTRAL.get(name, ()):
            del schema[name]
    if isinstance(reference := schema.get("$ref"), str):
        schema["$ref"] = quote(reference, safe="!#$%&'()*+,-./:;=?@_~")  # of a type such as "Page<Item>"
        if _is_loop(schema, resource):
            raise ValueError(f"$ref={reference!r:.80}: refers to itself")
    # some can't be done: without them, the answer is valid all the same
    if isinstance(some := schema.get("anyOf"), list) and (possible := [x for x in some if not _looks_around(x)]):
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
    """Whether no value can be valid by two of these schemas, as far as their types and single values tell.

    Where the property that OpenAPI's `discriminator` names tells objects apart, they must have it from now on.
    """
    by_type: dict[str, list[dict[str, Any]]] = {}
    for schema in schemas if isinstance(schemas, list) else [None]:
        own = _resolved(schema, resource)
        if (types := _types(own)) is None:
            return False
        for name in types:
            by_type.setdefault(name, []).append(own)
    tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
    return all(
        len(group) == 1 or _differ(group) or (name == "object" and _are_told_apart(group, tag, resource))
        for name, group in by_type.items()
    )


def _are_told_apart(objects: list[dict[str, Any]], tag: Any, resource: dict[str, Any]) -> bool:
    """Whether they have a property that is required, or `tag`, and has other values in each."""
    properties = [own["properties"] if isinstance(own.get("properties"), dict) else {} for own in objects]
    required = [own["required"] if isinstance(own.get("required"), list) else [] for own in objects]
    for name in properties[0]:
        is_there = name == tag or all(name in names for names in required)
        if is_there and _differ([_resolved(x.get(name), resource) for x in properties]):
            for own, names in zip(objects, required):
                own["required"] = names if name in names else [*names, name]
            return True
    return False


def _differ(schemas: list[Any]) -> bool:
    """Whether each is valid for a few values alone, and no two for the same."""
    found = [_values(schema) for schema in schemas]
    return None not in found and len({*chain(*filter(None, found))}) == sum(len(values or ()) for values in found)


def _values(schema: Any) -> set[tuple[type, Any]] | None:
    """The only values that are valid, with their types; None if there are others, or numbers with a fraction."""
    if not isinstance(schema, dict):
        return None
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(value, (str, int, NoneType)) for value in values):
        return None
    return {(type(value), value) for value in values}


def _types(schema: Any) -> set[str] | None:
    """The types of all valid values, where an integer is a number; None if the schema does not say."""
    if (values := _values(schema)) is not None:
        return {{str: "string", bool: "boolean", int: "number", NoneType: "null"}[kind] for kind, _ in values}
    types = schema.get("type") if isinstance(schema, dict) else None
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or not all(isinstance(name, str) for name in types):
        return None
    return {"number" if name == "integer" else name for name in types}


def _resolved(schema: Any, resource: dict[str, Any]) -> Any:
    """What it refers to in the end, which allows no less; None if that is not known."""
    for _ in range(MAX_REFERENCES):
        if not isinstance(schema, dict) or "$ref" not in schema:
            return schema
        schema = referred(schema["$ref"], resource)
        if isinstance(schema, dict) and "$id" in schema and schema is not resource:  # in which "#" is another schema
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
    """Allow only the properties whose names are valid by the schema `names`."""
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
    schema["properties"] = {name: own for name, own in properties.items() if name in allowed}
    if value is not False and (others := [name for name in allowed if name not in properties]):
        # they share one schema: a copy for each could be too much text
        place = next(name for i in count(len(resource)) if (name := f"x-value-{i}") not in resource)
        resource[place] = value
        schema["properties"] |= {name: {"$ref": f"#/{place}"} for name in others}


def _allowed_strings(schema: Any, resource: dict[str, Any]) -> str | dict[str, None] | None:
    """The strings that are valid by a schema: all (None), those that match a pattern, or a set, in its order."""
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
    wanted = "'enum', 'const', an 'anyOf' of these, 'pattern', or 'minLength' and 'maxLength'"
    raise ValueError(f"propertyNames: {[*rules]} is not supported there; it may have {wanted}")


def _rules(schema: Any) -> dict[str, Any]:
    """What a schema has that constrains strings, besides its type."""
    rules = {name: schema[name] for name in OF_STRINGS if name in schema} if isinstance(schema, dict) else {}
    return {name: value for name, value in rules.items() if not (name == "format" and _is_annotation(value))}


def _listed(schema: Any) -> list[str] | None:
    """The strings of `enum` or `const`, if nothing else constrains them."""
    rules = _rules(schema)
    values = [rules["const"]] if [*rules] == ["const"] else rules["enum"] if [*rules] == ["enum"] else None
    return [value for value in values if isinstance(value, str)] if isinstance(values, list) else None
