//! Matrix units that a test pretends to have: the kernels for them then run with their fragments emulated, see
//! [`super::gemm_coop`] and [`super::attention_coop`].
#![cfg(test)]

use crate::gpu::{Fragments, MatrixUnits, Variant};
use std::cell::Cell;

/// What the kernels are for: Apple, NVIDIA, AMD.
pub(crate) const OF_8: Fragments = Fragments { units: MatrixUnits::Coop8, lanes: 32, vary: false };
pub(crate) const OF_16: Fragments = Fragments { units: MatrixUnits::Coop16, lanes: 32, vary: false };
pub(crate) const OF_16_BY_64: Fragments = Fragments { units: MatrixUnits::Coop16, lanes: 64, vary: true };

thread_local! {
    static EMULATED: Cell<Option<(Fragments, u32)>> = const { Cell::new(None) };
}

/// The fragments that this thread emulates.
pub(super) fn fragments() -> Option<Fragments> {
    Some(EMULATED.get()?.0)
}

/// The variant of a kernel whose subgroups have the emulation's width.
pub(super) fn told(variant: Variant) -> Variant {
    match EMULATED.get() {
        Some((_, width)) => variant.constant("WIDTH", width),
        None => variant,
    }
}

/// While it lives, this thread has matrix units.
pub(crate) struct Emulation(());

impl Emulation {
    /// From now on.
    pub(crate) fn start(fragments: Fragments) -> Emulation {
        Emulation::of_width(fragments, fragments.lanes)
    }

    /// From now on, and kernels are told that their subgroups have `width` lanes.
    pub(crate) fn of_width(fragments: Fragments, width: u32) -> Emulation {
        EMULATED.set(Some((fragments, width)));
        Emulation(())
    }
}

impl Drop for Emulation {
    fn drop(&mut self) {
        EMULATED.set(None);
    }
}
