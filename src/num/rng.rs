//! Counter-based random numbers: element `i` of stream `name` under `seed` is a pure function of the three,
//! so that any rank can draw any slice of a parameter, in any order, and all agree.
//!
//! Generator: Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3",
//! SC11). The key is the 64-bit FNV-1a hash of the name; the counter holds the block `i / 4` and the seed;
//! each block gives four words.

use super::bf16;
use super::formula::fnv1a;
use super::normal::{inverse_normal_cdf, normal_cdf};

const MULTIPLIER: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Philox4x32-10: four random words for a counter and a key.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = MULTIPLIER[0] as u64 * counter[0] as u64;
        let b = MULTIPLIER[1] as u64 * counter[2] as u64;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// The random numbers that belong to one name and one seed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream {
    seed: u64,
    key: u64,
}

impl Stream {
    /// The stream of `name` (a parameter's name, say) under `seed`.
    pub fn new(seed: u64, name: &str) -> Self {
        Stream { seed, key: fnv1a(name.as_bytes()) }
    }

    /// 32 random bits for element `i`.
    pub fn word(&self, i: u64) -> u32 {
        let block = i / 4;
        let counter = [block as u32, (block >> 32) as u32, self.seed as u32, (self.seed >> 32) as u32];
        philox4x32(counter, [self.key as u32, (self.key >> 32) as u32])[(i % 4) as usize]
    }

    /// Uniform in [0, 1) on a grid of 2^-24.
    pub fn uniform(&self, i: u64) -> f32 {
        (self.word(i) >> 8) as f32 * 2f32.powi(-24)
    }

    /// Standard normal, by inversion of the distribution function; within +-6.3.
    pub fn normal(&self, i: u64) -> f32 {
        inverse_normal_cdf(self.open_unit(i)) as f32
    }

    /// Normal with mean 0 and deviation `std`, truncated to `low..=high` (absolute bounds, `low < high`).
    ///
    /// The distribution of PyTorch's `nn.init.trunc_normal_` in f32: a uniform number between the
    /// probabilities of the two bounds, through the inverse distribution function, clamped.
    pub fn trunc_normal(&self, i: u64, std: f64, low: f64, high: f64) -> f32 {
        let (p_low, p_high) = (normal_cdf(low / std), normal_cdf(high / std));
        let p = p_low + self.open_unit(i) * (p_high - p_low);
        (inverse_normal_cdf(p) * std).clamp(low, high) as f32
    }

    /// What `trunc_normal_` gives for a bf16 tensor on CUDA with its default bounds +-2 and `std` well below
    /// them.
    ///
    /// The uniform number on [-1, 1) is rounded to bf16, and +1 is mapped to -1; -1 becomes minus infinity
    /// and is clamped: one element in 512 is -2. Upstream's tests of 2025 ran on weights like these (pytorch
    /// issues 145498, 155588).
    pub fn trunc_normal_bf16(&self, i: u64, std: f32) -> f32 {
        let u = bf16::round(2.0 * self.uniform(i) - 1.0);
        if u.abs() == 1.0 {
            return -2.0;
        }
        let erfinv = inverse_normal_cdf((u as f64 + 1.0) / 2.0) / std::f64::consts::SQRT_2;
        let factor = std as f64 * std::f64::consts::SQRT_2;
        bf16::round((bf16::round(erfinv as f32) as f64 * factor) as f32).clamp(-2.0, 2.0)
    }

    /// Uniform in (0, 1), symmetric, on a grid of 2^-32.
    fn open_unit(&self, i: u64) -> f64 {
        (self.word(i) as f64 + 0.5) * 2f64.powi(-32)
    }
}
