//! The parameter table over one flat f32 store.
