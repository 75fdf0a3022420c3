# SPDX-License-Identifier: Apache-2.0
"""The methods: one module each, or one folder where a method does more than score.

A policy is made of eight parts. Each part is a class of its own, named in a preset by its `kind`:

    scorer     how important is each key of a layer?          keydiff.py, observation_window.py, ...
    allocator  how many tokens does each layer keep?          curves.py, solved/, ...
    selector   which tokens stay, given scores and a number?  selectors.py
    schedule   when does a request evict?                     schedules.py
    values     where does V lie, and does it change?          host_values/, ridge_values/
    chunk      does a prompt evict before its end?            policy/chunk.py
    attend     what do generated tokens read?                 pages/
    heads      do KV heads have lengths of their own?         streaming_heads/, adaptive_heads/, ...

A new scorer is one file in this folder: a subclass of `scorer.Scorer` with a `kind` and a `score`.
Nothing else names it; `kinds.py` finds the classes by walking through this folder. A class of your
own works from any module (`kind: "package.module:ClassName"`), see docs/write_a_method.md.

The modules at the top of a folder are imported by every command, so they do not import torch or
vLLM; what runs in a worker or in the scheduler is imported when that process asks for it.
"""
