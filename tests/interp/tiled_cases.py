"""Calls whose kernels copy tiles of what their score functions read."""

import numpy as np
from attention_cases import Problem
from tile_scores import OUTER

from flashgen.attention import tiles
from flashgen.interp.common import round_to


class Tiled(Problem):
    """A call whose arrays may be smaller along batches and heads; as TMA sees them they have four axes."""

    def __init__(self, spec, name, *sizes, height=2.0, more=(0, 0), **options):
        """height: of the numbers in the arrays. more: rows and columns beyond the sequences, of NaN."""
        draw = np.random.default_rng(1)
        shape = sizes[3] + more[0], sizes[4] + more[1]
        given = {}
        for item, outer in zip(spec.score.arrays, OUTER[name], strict=True):
            array = round_to(item.dtype, height * draw.standard_normal((*outer, *shape)))
            array[..., sizes[3] :, :] = array[..., sizes[4] :] = np.nan
            given[item.name] = array
        super().__init__(spec, *sizes, given=given, **options)
        self.arrays |= {item: array.reshape(*(1,) * (4 - array.ndim), *array.shape) for item, array in given.items()}

    @property
    def scalars(self):
        lasts = {}
        for item in tiles.fit(self.spec):
            for axis, size in enumerate(self.aux[item.name].shape[:-2]):
                lasts[tiles.last(item, axis)] = size - 1
        return super().scalars | lasts
