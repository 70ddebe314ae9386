"""The OpenEngine contract over gRPC: its messages and how they map to the values of `openengine`.

`convert` maps messages to values and back; `openengine.proto` and `tokenizer.proto` are the contract, and the
`*_pb2` modules are generated from them. Everything here uses public names of `openengine` only.
"""
