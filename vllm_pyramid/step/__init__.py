# SPDX-License-Identifier: Apache-2.0
"""The records of a worker's step, which the runtime, the attention layers and the methods share.

Step             the requests of the step, what each has skipped, which come to an eviction
StepEvictions    the requests that come to an eviction
AttentionInputs  the inputs of one layer's attention: query, caches, table, softmax
EvictionBatch    the requests that one layer shortens, on the device of the attention
ScorerInputs     one of them, for a scorer
"""
