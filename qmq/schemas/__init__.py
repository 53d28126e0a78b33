"""Declared schemas of subjects: what the bodies of a subject look like (docs/SCHEMAS.md).

field_types.py      what both formats come to: structs of fields
json_schema.py      a JSON Schema as such a struct
avro_schema.py      an Avro schema as such a struct
declared_schema.py  a declared schema as such a struct, and whether a new version may follow an old
                    one
body_decoder.py     bodies into values, by a schema; needs msgspec
schema_check.py     an interceptor that refuses messages which do not fit, at the producer
"""
