//! Sharding of parameters and gradients over ranks.
