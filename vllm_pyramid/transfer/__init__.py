# SPDX-License-Identifier: Apache-2.0
"""Evicted states on their way from an engine that prefills to one that decodes.

prefilling engine (P)                                decoding engine (D)
a request ends after its prompt was evicted
outgoing: name the state, put its head
worker: put the blocks of every layer's tail
response: a ticket                  --- client --->  request with the ticket
                                                     incoming: fetch the head, compare
                                    <-- transport -- tables with tails alone
                                                     worker: fetch the blocks, write them
                                                     the answer goes on behind its first token
"""
