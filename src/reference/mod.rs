//! The oracles: each op as a plain function over slices, no GPU.
