//! What is measured on: random values that host and device can both make, shapes, and group sizes.

use crate::gpu::Gpu;
use crate::num::formula::{fnv1a, splitmix64};
use crate::num::{DType, bf16};
use crate::tensor::Tensor;
use crate::{Error, Result};

/// Bytes made and uploaded at a time.
const CHUNK: usize = 64 << 20;
/// Largest number in a shape: products of three, times 4 bytes, stay below 2^63.
pub(super) const LARGEST: usize = 1 << 20;

/// A tensor of random values, each a pure function of its place: about normal (the sum of four uniform numbers), within
/// `2 sqrt(3)` standard deviations, in random order, rounded to the dtype.
///
/// Random bits matter: zeros and sorted values let a GPU run at a higher clock than real data do.
#[derive(Clone, Copy, Debug)]
pub struct Random {
    seed: u64,
    std: f32,
    dtype: DType,
}

impl Random {
    /// The values of the tensor called `name`, with standard deviation `std`; f32 or bf16.
    pub fn new(name: &str, std: f32, dtype: DType) -> Random {
        Random { seed: fnv1a(name.as_bytes()), std, dtype }
    }

    /// Element `i`, row-major.
    pub fn value(&self, i: usize) -> f32 {
        let bits = splitmix64(self.seed, i as u64);
        let sum: u32 = [0, 16, 32, 48].map(|s| (bits >> s) as u32 & 0xffff).iter().sum();
        // Four uniform numbers in [0, 1) have mean 2 and variance 1/3.
        let x = ((sum as f32 + 2.0) / 65536.0 - 2.0) * 3f32.sqrt() * self.std;
        if self.dtype == DType::BF16 { bf16::round(x) } else { x }
    }

    /// Elements `start`, `start + step`, ... in all `n`.
    pub fn vector(&self, start: usize, step: usize, n: usize) -> Vec<f32> {
        (0..n).map(|i| self.value(start + i * step)).collect()
    }

    /// The tensor on the device.
    ///
    /// # Errors
    /// Over the adapter's limits, or out of memory.
    pub fn tensor(&self, gpu: &Gpu, name: &str, shape: &[usize]) -> Result<Tensor> {
        let t = Tensor::empty(gpu, name, shape, self.dtype)?;
        let (cols, row_bytes) = (t.cols(), t.quads() * self.dtype.quad_bytes());
        let (buffer, offset) = t.memory();
        let per_chunk = (CHUNK / row_bytes.max(1)).max(1);
        for first in (0..t.rows()).step_by(per_chunk) {
            let rows = per_chunk.min(t.rows() - first);
            let mut bytes = vec![0u8; rows * row_bytes];
            self.fill(&mut bytes, first, cols, row_bytes);
            gpu.upload(buffer, offset + (first * row_bytes) as u64, &bytes)?;
        }
        Ok(t)
    }

    /// Rows from `first` on, each `row_bytes` long with its padding zero, by all cores.
    fn fill(&self, bytes: &mut [u8], first: usize, cols: usize, row_bytes: usize) {
        let rows = bytes.len() / row_bytes.max(1);
        let share = rows.div_ceil(std::thread::available_parallelism().map_or(1, |n| n.get())).max(1);
        let size = self.dtype.size();
        std::thread::scope(|scope| {
            for (part, bytes) in bytes.chunks_mut(share * row_bytes).enumerate() {
                scope.spawn(move || {
                    for (r, row) in bytes.chunks_mut(row_bytes).enumerate() {
                        let at = (first + part * share + r) * cols;
                        for (c, out) in row.chunks_mut(size).take(cols).enumerate() {
                            let x = self.value(at + c);
                            match self.dtype {
                                DType::BF16 => out.copy_from_slice(&bf16::to_bits(x).to_le_bytes()),
                                _ => out.copy_from_slice(&x.to_le_bytes()),
                            }
                        }
                    }
                });
            }
        });
    }
}

/// `n` different-looking places in `rows x cols`, the corners first.
pub fn places(rows: usize, cols: usize, n: usize) -> Vec<(usize, usize)> {
    if rows * cols == 0 {
        return Vec::new();
    }
    let corners = [(0, 0), (rows - 1, cols - 1), (0, cols - 1), (rows - 1, 0)];
    let seed = fnv1a(b"places");
    let random = (0..n).map(|i| {
        let at = splitmix64(seed, i as u64);
        ((at >> 32) as usize % rows, (at & 0xffff_ffff) as usize % cols)
    });
    corners.into_iter().chain(random).take(n).collect()
}

/// Reads a shape such as `16384x5120x8192`: as many numbers as `form` has letters.
///
/// # Errors
/// Another form, or a number that is 0 or too large.
pub fn parse_shape(text: &str, form: &str) -> Result<Vec<usize>> {
    let wanted = form.split('x').count();
    let numbers: Vec<Option<usize>> = text.split('x').map(|n| n.trim().parse().ok()).collect();
    let good = |n: &Option<usize>| n.is_some_and(|n| n > 0 && n <= LARGEST);
    if numbers.len() != wanted || !numbers.iter().all(good) {
        return Err(Error::user(
            format!("--shape {text}: {wanted} numbers from 1 to {LARGEST} are needed"),
            format!("write them as {form}"),
        ));
    }
    Ok(numbers.into_iter().flatten().collect())
}

/// How rows fall into groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Split {
    /// `uniform`, `ragged`, or where the sizes come from.
    pub name: String,
    /// Rows of each group.
    pub sizes: Vec<usize>,
}

impl Split {
    /// All rows in one group, as dense layers have it.
    pub fn dense(rows: usize) -> Split {
        Split { name: "-".into(), sizes: vec![rows] }
    }

    /// Equal sizes, as nearly as can be.
    pub fn uniform(rows: usize, groups: usize) -> Split {
        let sizes = (0..groups).map(|g| rows * (g + 1) / groups - rows * g / groups).collect();
        Split { name: "uniform".into(), sizes }
    }

    /// Each group half of the one before, in multiples of 16; the first takes what is over.
    pub fn ragged(rows: usize, groups: usize) -> Split {
        let total: f64 = (0..groups).map(|g| 0.5f64.powi(g as i32)).sum();
        let size = |g: usize| (rows as f64 * 0.5f64.powi(g as i32) / total) as usize / 16 * 16;
        let mut sizes: Vec<usize> = (0..groups).map(size).collect();
        sizes[0] += rows - sizes.iter().sum::<usize>();
        Split { name: "ragged".into(), sizes }
    }

    /// All rows.
    pub fn rows(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// The exclusive end row of each group.
    pub fn ends(&self) -> Vec<u32> {
        let mut end = 0;
        self.sizes.iter().map(|n| (end += *n as u32, end).1).collect()
    }

    /// The rows of group `g`.
    pub fn range(&self, g: usize) -> std::ops::Range<usize> {
        let start = self.sizes[..g].iter().sum();
        start..start + self.sizes[g]
    }

    /// The group of a row.
    ///
    /// # Panics
    /// When no group has it.
    pub fn group_of(&self, row: usize) -> usize {
        (0..self.sizes.len()).find(|g| self.range(*g).contains(&row)).expect("a row of a group")
    }
}

#[cfg(test)]
mod tests {
    use super::{Split, parse_shape, places};

    #[test]
    fn groups_cover_all_rows() {
        for (rows, groups) in [(16384, 8), (17, 8), (1, 3), (100, 1), (257, 5)] {
            for split in [Split::uniform(rows, groups), Split::ragged(rows, groups)] {
                assert_eq!((split.rows(), split.sizes.len()), (rows, groups), "{split:?}");
                assert_eq!(split.ends().last(), Some(&(rows as u32)));
                assert!(split.range(split.group_of(rows - 1)).contains(&(rows - 1)));
            }
        }
        assert_eq!(Split::ragged(1024, 3).sizes, [592, 288, 144]);
    }

    #[test]
    fn shapes_are_read_or_refused() {
        assert_eq!(parse_shape("4x5x6", "MxKxN").unwrap(), [4, 5, 6]);
        for bad in
            ["4x5", "4x5x6x7", "0x1x2", "ax1x2", "", "1x2x99999999999", "-1x2x3", "1x2x18446744073709551616"]
        {
            assert!(parse_shape(bad, "MxKxN").unwrap_err().to_string().contains("MxKxN"), "{bad}");
        }
    }

    #[test]
    fn places_are_inside() {
        for (rows, cols) in [(1, 1), (3, 7), (1000, 2)] {
            assert!(places(rows, cols, 40).iter().all(|(r, c)| *r < rows && *c < cols));
        }
        assert!(places(0, 5, 3).is_empty());
    }
}
