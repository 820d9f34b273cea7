//! Shape, dtype and buffer handle.
//!
//! See "Quads" in ARCHITECTURE.md: a matrix-like tensor's rows are whole quads, zero past the width; a flat tensor
//! is a plain vector.

use crate::Result;
use crate::gpu::{Access, Binding, Buffer, Gpu};
use crate::num::DType;
use half::bf16;
use std::sync::Arc;

/// A typed view of device memory. Cloning shares the memory.
#[derive(Clone, Debug)]
pub struct Tensor {
    shape: Vec<usize>,
    dtype: DType,
    flat: bool,
    buffer: Arc<Buffer>,
    offset: u64,
}

/// Bytes that a quads tensor of this shape takes.
pub fn quad_bytes(shape: &[usize], dtype: DType) -> u64 {
    let (cols, rows) = shape.split_last().map_or((1, 1), |(c, r)| (*c, r.iter().product::<usize>()));
    (rows * cols.div_ceil(4) * dtype.quad_bytes()) as u64
}

impl Tensor {
    /// A tensor of quads with undefined contents; `name` is for messages.
    ///
    /// # Errors
    /// Over the adapter's limits, or out of memory.
    pub fn empty(gpu: &Gpu, name: &str, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let buffer = gpu.alloc(name, quad_bytes(shape, dtype))?;
        Ok(Tensor { shape: shape.to_vec(), dtype, flat: false, buffer, offset: 0 })
    }

    /// Tensors of one shape with undefined contents: one after another in one buffer where each of them can be bound there, and all
    /// at once (see [`Tensor::stacked`]), else apart.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    pub fn empty_stack<const P: usize>(
        gpu: &Gpu,
        name: &str,
        shape: &[usize],
        dtype: DType,
    ) -> Result<[Tensor; P]> {
        let (caps, each) = (gpu.caps(), quad_bytes(shape, dtype));
        let fits = P as u64 * each <= caps.max_binding.min(caps.max_buffer);
        if P < 2 || !fits || !each.is_multiple_of(caps.align.max(16)) {
            let apart = (0..P).map(|_| Tensor::empty(gpu, name, shape, dtype)).collect::<Result<Vec<_>>>()?;
            return Ok(apart.try_into().expect("P tensors"));
        }
        let whole = Tensor::empty(gpu, name, &[&[P], shape].concat(), dtype)?;
        Ok(std::array::from_fn(|p| whole.unstack(p)))
    }

    /// A flat tensor of `n` elements with undefined contents.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    pub fn flat(gpu: &Gpu, name: &str, n: usize, dtype: DType) -> Result<Tensor> {
        let buffer = gpu.alloc(name, (n * dtype.size()) as u64)?;
        Ok(Tensor { shape: vec![n], dtype, flat: true, buffer, offset: 0 })
    }

    /// A view of existing memory, `offset` bytes in.
    pub fn view(buffer: &Arc<Buffer>, offset: u64, shape: &[usize], dtype: DType) -> Tensor {
        assert!(
            offset + quad_bytes(shape, dtype) <= buffer.size(),
            "view {shape:?} at {offset} of {buffer:?}"
        );
        Tensor { shape: shape.to_vec(), dtype, flat: false, buffer: buffer.clone(), offset }
    }

    /// Uploads row-major values as a tensor of quads, rounding to `dtype`.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    pub fn from_f32(gpu: &Gpu, name: &str, shape: &[usize], dtype: DType, values: &[f32]) -> Result<Tensor> {
        let t = Tensor::empty(gpu, name, shape, dtype)?;
        t.write_f32(gpu, values)?;
        Ok(t)
    }

    /// Uploads a flat tensor of f32.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    pub fn from_flat_f32(gpu: &Gpu, name: &str, values: &[f32]) -> Result<Tensor> {
        let t = Tensor::flat(gpu, name, values.len(), DType::F32)?;
        gpu.upload(&t.buffer, t.offset, bytemuck::cast_slice(values))?;
        Ok(t)
    }

    /// Uploads a flat tensor of u32.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    pub fn from_u32(gpu: &Gpu, name: &str, values: &[u32]) -> Result<Tensor> {
        let t = Tensor::flat(gpu, name, values.len(), DType::U32)?;
        gpu.upload(&t.buffer, t.offset, bytemuck::cast_slice(values))?;
        Ok(t)
    }

    /// Copies flat tensors side by side into one, on the device; words keep their bits whatever their type.
    ///
    /// # Errors
    /// As [`Tensor::empty`].
    pub fn side_by_side(gpu: &Gpu, name: &str, parts: &[&Tensor]) -> Result<Tensor> {
        let words = parts.iter().map(|p| p.numel()).sum();
        let all = Tensor::flat(gpu, name, words, DType::U32)?;
        let mut at = all.offset;
        for part in parts {
            assert!(
                part.flat && part.dtype.size() == 4,
                "side by side: {:?} is not a flat vector of words",
                part.shape
            );
            gpu.copy((&part.buffer, part.offset), (&all.buffer, at), part.bytes());
            at += part.bytes();
        }
        Ok(all)
    }

    /// Replaces the contents by row-major values (f32 and bf16 tensors of quads).
    ///
    /// # Errors
    /// What the device reported.
    pub fn write_f32(&self, gpu: &Gpu, values: &[f32]) -> Result<()> {
        assert_eq!(values.len(), self.numel(), "values for shape {:?}", self.shape);
        let cols = self.cols();
        let mut padded = vec![0f32; self.rows() * self.quads() * 4];
        for (from, to) in values.chunks(cols.max(1)).zip(padded.chunks_mut(self.quads().max(1) * 4)) {
            to[..cols].copy_from_slice(from);
        }
        match self.dtype {
            DType::F32 => gpu.upload(&self.buffer, self.offset, bytemuck::cast_slice(&padded)),
            DType::BF16 => {
                let half: Vec<bf16> = padded.iter().map(|v| bf16::from_f32(*v)).collect();
                gpu.upload(&self.buffer, self.offset, bytemuck::cast_slice(&half))
            }
            other => panic!("upload of values as {other}: quantize on the device"),
        }
    }

    /// Row-major values, waiting for the device (f32 and bf16 tensors).
    ///
    /// # Errors
    /// What the device reported.
    pub fn to_f32(&self, gpu: &Gpu) -> Result<Vec<f32>> {
        let bytes = gpu.download(&self.buffer, self.offset, self.bytes())?;
        let padded: Vec<f32> = match self.dtype {
            DType::F32 => bytemuck::pod_collect_to_vec(&bytes),
            DType::BF16 => bytemuck::pod_collect_to_vec::<u8, u16>(&bytes)
                .iter()
                .map(|b| bf16::from_bits(*b).to_f32())
                .collect(),
            other => panic!("values of a {other} tensor: download its codes"),
        };
        Ok(self.strip(&padded))
    }

    /// Row-major bytes of an fp8 tensor.
    ///
    /// # Errors
    /// What the device reported.
    pub fn to_codes(&self, gpu: &Gpu) -> Result<Vec<u8>> {
        assert_eq!(self.dtype.size(), 1, "codes of a {} tensor", self.dtype);
        Ok(self.strip(&gpu.download(&self.buffer, self.offset, self.bytes())?))
    }

    /// Values of a flat u32 tensor.
    ///
    /// # Errors
    /// What the device reported.
    pub fn to_u32(&self, gpu: &Gpu) -> Result<Vec<u32>> {
        assert_eq!(self.dtype, DType::U32, "integers of a {} tensor", self.dtype);
        Ok(bytemuck::pod_collect_to_vec(&gpu.download(&self.buffer, self.offset, self.bytes())?))
    }

    /// Drops the padding of each row.
    fn strip<T: Copy>(&self, padded: &[T]) -> Vec<T> {
        if self.flat {
            return padded[..self.shape[0]].to_vec();
        }
        let width = self.quads() * 4;
        padded.chunks(width.max(1)).flat_map(|row| row[..self.cols()].iter().copied()).collect()
    }

    /// The same memory under another shape with the same last dimension and number of rows.
    #[track_caller]
    #[must_use]
    pub fn reshape(&self, shape: &[usize]) -> Tensor {
        let same = self.cols() == shape.last().copied().unwrap_or(1)
            && self.numel() == shape.iter().product::<usize>();
        assert!(
            same && !self.flat,
            "reshape {:?} to {shape:?}: only leading dimensions can change",
            self.shape
        );
        Tensor { shape: shape.to_vec(), ..self.clone() }
    }

    /// Rows `from..to` of a tensor of quads as a view; the first byte must suit the adapter's binding alignment.
    #[track_caller]
    #[must_use]
    pub fn slice_rows(&self, from: usize, to: usize) -> Tensor {
        assert!(!self.flat && from <= to && to <= self.rows(), "rows {from}..{to} of {:?}", self.shape);
        let offset = self.offset + (from * self.quads() * self.dtype.quad_bytes()) as u64;
        Tensor { shape: vec![to - from, self.cols()], offset, ..self.clone() }
    }

    /// `tensors` as one, (P, their shape...), if they have one shape and dtype and lie one after another in one buffer.
    #[must_use]
    pub fn stacked(tensors: &[&Tensor]) -> Option<Tensor> {
        let (first, _) = tensors.split_first()?;
        let mut at = first.offset;
        for t in tensors {
            let alike = t.shape == first.shape && t.dtype == first.dtype && !t.flat;
            if !alike || !Arc::ptr_eq(&t.buffer, &first.buffer) || t.offset != at {
                return None;
            }
            at += t.bytes();
        }
        Some(Tensor { shape: [&[tensors.len()], &first.shape[..]].concat(), ..(*first).clone() })
    }

    /// Tensor `p` of a stack (P, shape...).
    #[track_caller]
    #[must_use]
    pub fn unstack(&self, p: usize) -> Tensor {
        let (count, shape) = self.shape.split_first().expect("a stack has a dimension");
        assert!(p < *count && !shape.is_empty() && !self.flat, "tensor {p} of {:?}", self.shape);
        let offset = self.offset + p as u64 * quad_bytes(shape, self.dtype);
        Tensor { shape: shape.to_vec(), offset, ..self.clone() }
    }

    /// Elements `from..to` of a flat tensor as a view.
    #[track_caller]
    #[must_use]
    pub fn slice_flat(&self, from: usize, to: usize) -> Tensor {
        assert!(self.flat && from <= to && to <= self.shape[0], "elements {from}..{to} of {:?}", self.shape);
        let offset = self.offset + (from * self.dtype.size()) as u64;
        Tensor { shape: vec![to - from], offset, ..self.clone() }
    }

    /// The dimensions.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// Product of all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, rest)| rest.iter().product())
    }

    /// The last dimension.
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Quads of one row.
    pub fn quads(&self) -> usize {
        self.cols().div_ceil(4)
    }

    /// Product of all dimensions.
    pub fn numel(&self) -> usize {
        self.shape.iter().product()
    }

    /// Bytes in memory, padding included.
    pub fn bytes(&self) -> u64 {
        if self.flat {
            (self.numel() * self.dtype.size()) as u64
        } else {
            quad_bytes(&self.shape, self.dtype)
        }
    }

    /// The memory and the first byte of this tensor in it.
    pub fn memory(&self) -> (&Arc<Buffer>, u64) {
        (&self.buffer, self.offset)
    }

    /// Whether both begin at the same byte of one buffer, in the same dtype.
    pub fn is_same_memory(&self, other: &Tensor) -> bool {
        (self.offset, self.dtype) == (other.offset, other.dtype) && Arc::ptr_eq(&self.buffer, &other.buffer)
    }

    /// Whether other tensors share the memory: then nothing may be written in place.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.buffer) > 1
    }

    /// Binding for a kernel that only reads it.
    pub fn read(&self) -> Binding {
        self.binding(Access::Read)
    }

    /// Binding for a kernel that writes it.
    pub fn write(&self) -> Binding {
        self.binding(Access::Write)
    }

    fn binding(&self, access: Access) -> Binding {
        // Storage bindings are at least one element of the largest WGSL type, and a multiple of 4 bytes.
        let size = self.bytes().max(16).next_multiple_of(16).min(self.buffer.size() - self.offset);
        Binding { buffer: self.buffer.clone(), offset: self.offset, size, access }
    }
}

#[cfg(test)]
mod tests {
    use super::Tensor;
    use crate::gpu::{Caps, DeviceChoice, Gpu};
    use crate::num::DType;

    #[test]
    fn tensors_side_by_side_are_one_stack() {
        let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter").planner();
        let shape = [64, 32];
        let [a, b, c] = Tensor::empty_stack(&gpu, "abc", &shape, DType::BF16).unwrap();
        let all = Tensor::stacked(&[&a, &b, &c]).expect("one buffer");
        assert_eq!((all.shape(), all.memory().1, all.bytes()), (&[3, 64, 32][..], 0, 3 * 4096));
        let pair = Tensor::stacked(&[&b, &c]).expect("a part of it");
        assert_eq!(pair.unstack(1).memory().1, 2 * 4096);
        assert!(Tensor::stacked(&[&a, &c]).is_none(), "not neighbours");
        assert!(Tensor::stacked(&[&b, &a]).is_none(), "another order");
        assert!(Tensor::stacked(&[&a, &b.reshape(&[2, 32, 32])]).is_none(), "another shape");
        // 3 x 8 bytes: the second could not be bound.
        let [d, e] = Tensor::empty_stack(&gpu, "de", &[3, 4], DType::BF16).unwrap();
        assert!(Tensor::stacked(&[&d, &e]).is_none() && !d.is_shared());
        assert!(Tensor::stacked(&[]).is_none());
    }

    /// What fits by itself never fails for want of room for a stack.
    #[test]
    fn tensors_whose_stack_is_over_a_limit_lie_apart() {
        let gpu = Gpu::open(&DeviceChoice::from_env()).expect("an adapter");
        let each = 4096;
        for (most, together) in [(2 * each, true), (2 * each - 1, false), (each, false)] {
            for caps in [Caps { max_binding: most, ..gpu.caps() }, Caps { max_buffer: most, ..gpu.caps() }] {
                let planner = gpu.planner_with(caps);
                let [a, b] = Tensor::empty_stack(&planner, "ab", &[64, 32], DType::BF16).expect("room");
                assert_eq!(Tensor::stacked(&[&a, &b]).is_some(), together, "{most} bytes at most");
            }
        }
    }
}
