//! The token stream in memory.

/// Token ids, two bytes each where V allows it.
#[derive(Debug)]
pub(super) enum Tokens {
    U16(Vec<u16>),
    U32(Vec<u32>),
}

impl Tokens {
    /// An empty stream of ids below `vocab`.
    pub(super) fn new(vocab: u32) -> Self {
        if vocab <= 1 << 16 { Tokens::U16(Vec::new()) } else { Tokens::U32(Vec::new()) }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Tokens::U16(v) => v.len(),
            Tokens::U32(v) => v.len(),
        }
    }

    /// Makes room for `n` more at once, so that a file of known length is not copied while the stream grows.
    pub(super) fn reserve(&mut self, n: usize) {
        match self {
            Tokens::U16(v) => v.reserve_exact(n),
            Tokens::U32(v) => v.reserve_exact(n),
        }
    }

    /// Appends `ids`, which must be below the `vocab` of [`Tokens::new`].
    pub(super) fn extend(&mut self, ids: &[u32]) {
        match self {
            Tokens::U16(v) => v.extend(ids.iter().map(|&id| id as u16)),
            Tokens::U32(v) => v.extend_from_slice(ids),
        }
    }

    fn get(&self, i: usize) -> u32 {
        match self {
            Tokens::U16(v) => u32::from(v[i]),
            Tokens::U32(v) => v[i],
        }
    }

    /// Elements `index*len .. (index+1)*len` of the stream repeated for ever.
    pub(super) fn row(&self, index: u64, len: usize) -> Vec<u32> {
        let n = self.len();
        let start = (u128::from(index) * len as u128 % n as u128) as usize;
        (0..len).map(|i| self.get((start + i) % n)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_run_on_over_the_end() {
        for vocab in [65_536, 65_537] {
            let mut t = Tokens::new(vocab);
            t.extend(&[0, 1, 2, 3, 4]);
            t.extend(&[5, 65_535]);
            assert_eq!(t.len(), 7);
            let rows: Vec<_> = (0..4).map(|i| t.row(i, 3)).collect();
            assert_eq!(rows, [[0, 1, 2], [3, 4, 5], [65_535, 0, 1], [2, 3, 4]]);
            assert_eq!(t.row(u64::MAX, 7), t.row(0, 7));
        }
    }
}
