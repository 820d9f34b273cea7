//! What several test programs share: the golden files under tests/fixtures.

#![allow(dead_code, reason = "each test program uses its own part of this module")]

use moe8::num::bf16;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};

/// The bytes of tests/fixtures/`name`.
pub fn fixture_bytes(name: &str) -> Vec<u8> {
    let path = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read(&path).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// A safetensors file of golden values.
pub struct Fixture(Vec<u8>);

impl Fixture {
    /// Reads tests/fixtures/`name`.
    pub fn read(name: &str) -> Self {
        Fixture(fixture_bytes(name))
    }

    /// A bf16 or f32 tensor as f32, with its shape.
    pub fn floats(&self, name: &str) -> (Vec<f32>, Vec<usize>) {
        self.with(name, |t| {
            let values = match t.dtype() {
                Dtype::F32 => words(t.data()).map(f32::from_bits).collect(),
                Dtype::BF16 => {
                    t.data().chunks(2).map(|b| bf16::from_bits(u16::from_le_bytes([b[0], b[1]]))).collect()
                }
                other => panic!("{name} is {other:?}"),
            };
            (values, t.shape().to_vec())
        })
    }

    /// An i32 tensor without negative values.
    pub fn words(&self, name: &str) -> Vec<u32> {
        self.with(name, |t| words(t.data()).collect())
    }

    /// A u8 tensor.
    pub fn bytes(&self, name: &str) -> Vec<u8> {
        self.with(name, |t| t.data().to_vec())
    }

    fn with<R>(&self, name: &str, read: impl Fn(TensorView) -> R) -> R {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        read(file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}")))
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap()))
}
