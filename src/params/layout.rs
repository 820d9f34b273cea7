//! Where each rank's shard of each parameter lies.

use super::table::{ParamId, Spec, Table};
use crate::gpu::{Buffer, Gpu};
use crate::num::DType;
use crate::tensor::{Tensor, quad_bytes};
use crate::{Error, Result};
use std::cell::Cell;
use std::sync::Arc;

/// Values that are worth a thread of their own.
const LEAST_VALUES: usize = 1 << 14;

/// The shard of one parameter, the same on every rank but for its contents.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Which segment.
    pub segment: usize,
    /// First byte in it (f32).
    pub offset: u64,
    /// Quads of one unit: a slice of dimension 0, or one quad of a vector.
    pub unit: usize,
    /// Units of the whole parameter.
    pub units: usize,
    /// Units of a rank's shard, padding included.
    pub chunk: usize,
}

impl Place {
    /// Quads of a rank's shard.
    pub fn quads(&self) -> usize {
        self.chunk * self.unit
    }

    /// Units `from..to` of the parameter that `rank` holds.
    pub fn range(&self, rank: usize) -> (usize, usize) {
        ((rank * self.chunk).min(self.units), ((rank + 1) * self.chunk).min(self.units))
    }

    /// The shard of `rank` as quads of f32, padding included: `value(i)` gives element i of the whole parameter, row-major, in rows
    /// of `cols`. All cores ask for values.
    pub fn values(&self, rank: usize, cols: usize, value: &(dyn Fn(usize) -> f32 + Sync)) -> Vec<f32> {
        let width = cols.div_ceil(4) * 4;
        let (from, to) = self.range(rank);
        let mut shard = vec![0f32; self.quads() * 4];
        let (start, used) = (from * self.unit * 4, (to - from) * self.unit * 4);
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let part = used.div_ceil(cores).max(LEAST_VALUES);
        let fill = |first: usize, slots: &mut [f32]| {
            for (i, slot) in slots.iter_mut().enumerate() {
                let (row, col) = ((first + i) / width, (first + i) % width);
                if col < cols {
                    *slot = value(row * cols + col);
                }
            }
        };
        std::thread::scope(|scope| {
            let mut parts = shard[..used].chunks_mut(part).enumerate();
            // The first part is this thread's own.
            let own = parts.next();
            for (i, slots) in parts {
                scope.spawn(move || fill(start + i * part, slots));
            }
            own.into_iter().for_each(|(_, slots)| fill(start, slots));
        });
        shard
    }
}

/// The places of all parameters for a number of ranks.
#[derive(Clone, Debug)]
pub struct Layout {
    places: Vec<Place>,
    segments: Vec<u64>,
    world: usize,
}

impl Layout {
    /// Lays `table` out for `world` ranks in segments that one binding can hold.
    ///
    /// # Errors
    /// A shard larger than the adapter's binding limit.
    pub fn new(table: &Table, world: usize, gpu: &Gpu) -> Result<Layout> {
        let caps = gpu.caps();
        let limit = caps.max_binding.min(caps.max_buffer);
        // Twice what a binding wants, so that half of an offset, where the shard lies in bf16, can be bound too.
        let align = 2 * caps.align.max(256);
        let mut layout = Layout { places: Vec::new(), segments: vec![0], world };
        for (_, spec) in table.iter() {
            let mut place = place(spec, world);
            let bytes = (place.quads() * DType::F32.quad_bytes()) as u64;
            if bytes > limit {
                return Err(too_large(spec, bytes, limit));
            }
            let last = layout.segments.len() - 1;
            let start = layout.segments[last].next_multiple_of(align);
            if start + bytes > limit {
                layout.segments.push(bytes);
                (place.segment, place.offset) = (last + 1, 0);
            } else {
                layout.segments[last] = start + bytes;
                (place.segment, place.offset) = (last, start);
            }
            layout.places.push(place);
        }
        Ok(layout)
    }

    /// The place of `id`.
    pub fn place(&self, id: ParamId) -> &Place {
        &self.places[id.0]
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.world
    }
}

fn place(spec: &Spec, world: usize) -> Place {
    let quads = spec.shape.last().map_or(1, |c| c.div_ceil(4));
    let (units, unit) = match spec.shape.split_first() {
        Some((first, rest)) if !rest.is_empty() => {
            let between: usize = rest[..rest.len() - 1].iter().product();
            (*first, between * quads)
        }
        _ => (quads, 1),
    };
    Place { segment: 0, offset: 0, unit, units, chunk: units.div_ceil(world) }
}

fn too_large(spec: &Spec, bytes: u64, limit: u64) -> Error {
    Error::user(
        format!(
            "parameter {} {:?} takes {bytes} bytes in f32 on each rank, over this adapter's limit of {limit} bytes \
             for one binding",
            spec.name, spec.shape
        ),
        "use more ranks (parameters are cut along their first dimension), lower model.args.num_experts, dim or \
         vocab_size, or choose an adapter with a larger limit (`moe8 devices`)",
    )
}

/// One value per element of this rank's shards: the master weights, their copy in bf16, a gradient, or a moment of the optimizer.
#[derive(Clone, Debug)]
pub struct Store {
    segments: Vec<Arc<Buffer>>,
    /// Quads of each segment.
    sizes: Vec<usize>,
    dtype: DType,
}

impl Store {
    /// Segments full of zeros, f32 or bf16.
    ///
    /// # Errors
    /// Out of device memory.
    pub fn zeros(gpu: &Gpu, layout: &Layout, dtype: DType, name: &str) -> Result<Store> {
        let sizes: Vec<usize> = layout.segments.iter().map(|bytes| quads(*bytes)).collect();
        let mut segments = Vec::new();
        for (i, quads) in sizes.iter().enumerate() {
            let buffer = gpu.alloc(&format!("{name}, segment {i}"), quad_bytes(&[*quads, 4], dtype))?;
            gpu.clear(&buffer);
            segments.push(buffer);
        }
        Ok(Store { segments, sizes, dtype })
    }

    /// The dtype of its values.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Memory of this shape where the shard of `place` begins.
    fn view(&self, place: &Place, shape: &[usize]) -> Tensor {
        let offset = (quads(place.offset) * self.dtype.quad_bytes()) as u64;
        Tensor::view(&self.segments[place.segment], offset, shape, self.dtype)
    }

    /// This rank's shard of a parameter as quads: shape (quads, 4).
    pub fn shard(&self, place: &Place) -> Tensor {
        self.view(place, &[place.quads(), 4])
    }

    /// The shards from `first` to `last` of one segment, and what lies between them, as quads.
    pub fn range(&self, first: &Place, last: &Place) -> Tensor {
        assert_eq!(first.segment, last.segment, "a range of one segment");
        self.view(first, &[quads(last.offset - first.offset) + last.quads(), 4])
    }

    /// The whole parameter in its own shape; only where one rank holds all of it.
    pub fn whole(&self, place: &Place, shape: &[usize]) -> Tensor {
        assert_eq!(place.chunk, place.units, "whole parameter {shape:?} of a shard");
        self.view(place, shape)
    }

    /// Whole parameters of one shape (P, shape...), or of one parameter (shape), if one follows the other in memory without a gap.
    pub fn side_by_side(&self, places: &[&Place], shape: &[usize]) -> Option<Tensor> {
        let follows =
            |a: &Place, b: &Place| (a.segment, quads(a.offset) + a.quads()) == (b.segment, quads(b.offset));
        if !places.windows(2).all(|pair| follows(pair[0], pair[1])) {
            return None;
        }
        let several = (places.len() > 1).then_some(places.len());
        let shape: Vec<usize> = several.into_iter().chain(shape.iter().copied()).collect();
        Some(self.view(places.first()?, &shape))
    }

    /// Every segment as quads.
    pub fn segments(&self) -> Vec<Tensor> {
        let whole = |(b, quads): (&Arc<Buffer>, &usize)| Tensor::view(b, 0, &[*quads, 4], self.dtype);
        self.segments.iter().zip(&self.sizes).map(whole).collect()
    }
}

/// What one step of an optimizer reads and writes, segment by segment.
#[derive(Debug)]
pub struct Shards<'a> {
    /// f32 master weights.
    pub master: &'a Store,
    /// Gradients, f32 or bf16.
    pub grads: &'a Store,
    low: Option<&'a Store>,
    taken: Cell<bool>,
}

impl<'a> Shards<'a> {
    /// `low`: memory for the master weights in bf16, where that is of use.
    pub fn new(master: &'a Store, grads: &'a Store, low: Option<&'a Store>) -> Shards<'a> {
        Shards { master, grads, low, taken: Cell::new(false) }
    }

    /// The master weights in bf16, if they are of use. An optimizer that asks for them writes all of them, each new master weight
    /// rounded to nearest even; one that does not has them cast by others.
    pub fn take_low(&self) -> Option<&'a Store> {
        self.taken.set(true);
        self.low
    }

    /// Whether there are master weights in bf16 and the optimizer has taken it on itself to write them.
    pub fn has_low(&self) -> bool {
        self.taken.get() && self.low.is_some()
    }
}

/// Quads in so many bytes of f32.
fn quads(bytes: u64) -> usize {
    usize::try_from(bytes).expect("fits memory") / DType::F32.quad_bytes()
}
