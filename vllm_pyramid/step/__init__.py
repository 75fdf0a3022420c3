# SPDX-License-Identifier: Apache-2.0
"""What a worker's step is made of: shared by the model runners and by the methods.

Step            the requests of the step, what each has given up, who evicts now
LayerCall       one layer's attention call: query, caches, table, softmax
EvictionBatch   the requests that evict in one layer, where the attention is
LayerView       one of them, as a scorer sees it
"""
