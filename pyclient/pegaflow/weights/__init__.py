"""The identity of a model's weights, without an engine: ``pegaflow weights-id`` needs no vLLM.

``files`` selects the files that an engine loads, ``hub`` finds them in the cache of the Hugging
Face Hub, ``digests`` stores a SHA-256 digest for each file, ``identity`` combines them into one id.
"""
