"""Speculative decoding of models that are loaded in transformers, with their weights where they are.

`generate.py` is what users call, `target.py` a `Target` on the modules of such a model, `decoder.py` its layers with our KV
cache, `stack.py` the same layers as the kernels read them, `families.py` the models that are known, and `format.py` reads what
a call of `generate` asks for.
"""
