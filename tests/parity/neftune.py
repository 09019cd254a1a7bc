"""neftune.py - transformers' NEFTune with the random numbers of moetrain, for make_case.py: op_embed_noise with one
document per sequence and train.seed = 0. transformers' hook computes the size of the noise and adds it."""
import contextlib

import numpy
import torch
from transformers.integrations.neftune import activate_neftune

U64 = numpy.uint64


def mix64(x):
    x = (x ^ (x >> U64(30))) * U64(0xbf58476d1ce4e5b9)
    x = (x ^ (x >> U64(27))) * U64(0x94d049bb133111eb)
    return x ^ (x >> U64(31))


def rng_u64(key, counter):
    """rng_u64 of kernels/base.c; a number or an array of counters."""
    with numpy.errstate(over="ignore"):
        key, counter = U64(key), numpy.asarray(counter, dtype=U64)
        x = mix64(key + (counter + U64(1)) * U64(0x9e3779b97f4a7c15))
        return mix64(x ^ (key * U64(0xd1342543de82ef95) + U64(0x632be59bd9b4e019)))


def rng_key(seed, purpose):
    code = 0xcbf29ce484222325
    for byte in purpose.encode():
        code = (code ^ byte) * 0x100000001b3 % 2 ** 64
    with numpy.errstate(over="ignore"):
        return rng_u64(mix64(U64(seed) + U64(0x9e3779b97f4a7c15)), code)


class Noise:
    """The hook on the model's embedding, from here to end()."""

    def __init__(self, model, alpha):
        self.stack = contextlib.ExitStack()
        self.stack.callback(activate_neftune(model, alpha, None).remove)
        uniform = torch.Tensor.uniform_
        self.stack.callback(setattr, torch.Tensor, "uniform_", uniform)
        torch.Tensor.uniform_ = lambda x, low, high: self.fill(x, low, high)

    def begin(self, step):
        """Before the micro-batches of a step, from 0."""
        self.key, self.micro = rng_u64(rng_key(0, "neftune"), step), 0

    def fill(self, x, low, high):
        bits = rng_u64(rng_u64(self.key, self.micro), numpy.arange(x.numel())) >> U64(40)
        self.micro += 1
        unit = torch.from_numpy(bits.astype(numpy.float32) * numpy.float32(2.0 ** -23) - numpy.float32(1))
        assert low == -high
        return x.copy_(high * unit.view(x.shape))

    def end(self):
        self.stack.close()
