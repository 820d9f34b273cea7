//! Measurements that can be believed: results checked first, random data, a warm device, and the clock named.

pub mod step;
