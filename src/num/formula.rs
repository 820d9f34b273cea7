//! Numbers that any program can regenerate from a name: FNV-1a, SplitMix64, and the streams the parity
//! tests build on them, so that neither weights nor tokens have to be stored.

const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// 64-bit FNV-1a of `bytes` (Fowler, Noll and Vo: offset basis `0xcbf29ce484222325`, prime `0x100000001b3`).
pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |h, &b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// Element `i` of the SplitMix64 sequence that starts at `seed` (Steele, Lea and Flood 2014; the sequence of
/// Vigna's `splitmix64.c`), reached directly: any element costs the same.
pub fn splitmix64(seed: u64, i: u64) -> u64 {
    let mut z = seed.wrapping_add(i.wrapping_add(1).wrapping_mul(GOLDEN_GAMMA));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The stream `name`: element i is a multiple of 2^-23 in [-1, 1), exact in f32. Endless.
pub fn uniform(name: &str) -> impl Iterator<Item = f32> + use<> {
    let seed = fnv1a(name.as_bytes());
    // 24 random bits fit an f32 exactly, and so do the quotient and the difference.
    (0..).map(move |i| (splitmix64(seed, i) >> 40) as f32 / 8_388_608.0 - 1.0)
}

/// The first `count` weights of parameter `name` with standard deviation `std`:
/// `uniform(name) * f32(std * sqrt(3))`, the product in f32. Row-major in upstream's shape; expert tensors
/// in the layout of July 2025.
pub fn weights(name: &str, count: usize, std: f64) -> Vec<f32> {
    let scale = (std * 3f64.sqrt()) as f32;
    uniform(name).take(count).map(|u| u * scale).collect()
}

/// The standard deviation that the parity cases give to parameter `name`; `None` for a norm weight, which is 1.
pub fn parity_std(name: &str) -> Option<f64> {
    if name == "norm.weight" || name.ends_with("_norm.weight") {
        None
    } else if name.starts_with("tok_embeddings") {
        Some(1.0)
    } else if name.starts_with("output") {
        Some(0.0625)
    } else if name.contains("moe.router") {
        Some(0.3)
    } else {
        Some(0.02)
    }
}

/// Inputs and labels of one step of a parity case, both `batch * seq` row-major.
///
/// Stream `tag.tokens.step` (`step` from 1) gives `batch * (seq + 1)` numbers r; each sequence is
/// `t[0] = r % vocab`, then `t[i] = (5 t[i-1] + 17 + r % 4) % vocab`: after the first token two bits of
/// surprise each. Inputs are `t[..seq]`, labels `t[1..]`.
pub fn tokens(tag: &str, step: u64, batch: usize, seq: usize, vocab: u32) -> (Vec<u32>, Vec<u32>) {
    assert!(vocab > 0, "vocab must be at least 1");
    let seed = fnv1a(format!("{tag}.tokens.{step}").as_bytes());
    let vocab = u64::from(vocab);
    let (mut inputs, mut labels) = (Vec::with_capacity(batch * seq), Vec::with_capacity(batch * seq));
    for b in 0..batch {
        let mut t = 0u64;
        for s in 0..=seq {
            let r = splitmix64(seed, (b * (seq + 1) + s) as u64) >> 33;
            t = if s == 0 { r % vocab } else { (5 * t + 17 + r % 4) % vocab };
            if s < seq {
                inputs.push(t as u32);
            }
            if s > 0 {
                labels.push(t as u32);
            }
        }
    }
    (inputs, labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fnv1a_gives_the_published_values() {
        for (text, want) in
            [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8)]
        {
            assert_eq!(fnv1a(text.as_bytes()), want, "{text:?}");
        }
    }

    #[test]
    fn splitmix64_gives_the_published_values() {
        assert_eq!(splitmix64(0, 0), 0xE220_A839_7B1D_CDAF);
        let got: Vec<u64> = (0..3).map(|i| splitmix64(1_234_567, i)).collect();
        assert_eq!(got, [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]);
    }

    #[test]
    fn uniform_is_a_multiple_of_2_to_minus_23_in_range() {
        for u in uniform("layers.1.moe.experts.w1").take(1000) {
            assert!((-1.0..1.0).contains(&u) && (u * 8_388_608.0).fract() == 0.0, "{u}");
        }
    }

    #[test]
    fn weights_have_the_asked_standard_deviation() {
        let w = weights("x", 20_000, 0.5);
        let var = w.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / w.len() as f64;
        assert!((var.sqrt() - 0.5).abs() < 0.01, "{}", var.sqrt());
    }

    #[test]
    fn every_parameter_kind_has_its_parity_std() {
        for (name, want) in [
            ("tok_embeddings.weight", Some(1.0)),
            ("layers.0.ffn_norm.weight", None),
            ("norm.weight", None),
            ("output.weight", Some(0.0625)),
            ("layers.1.moe.router.gate.weight", Some(0.3)),
            ("layers.1.moe.shared_expert.w2", Some(0.02)),
        ] {
            assert_eq!(parity_std(name), want, "{name}");
        }
    }

    /// The inputs of step 1 of the parity cases; the rows of the embedding that have a gradient there agree.
    #[test]
    fn tokens_of_the_parity_cases() {
        for (tag, first, second) in [
            ("tiny_top1", [134, 175, 126, 138, 196, 230], [243, 208, 36, 198]),
            ("tiny_top2", [180, 149, 250, 243, 209, 41], [178, 140, 208, 36]),
        ] {
            let (x, _) = tokens(tag, 1, 2, 48, 256);
            assert_eq!((&x[..6], &x[48..52]), (&first[..], &second[..]), "{tag}");
        }
    }

    #[test]
    fn labels_are_inputs_moved_by_one_and_obey_the_recurrence() {
        let (x, y) = tokens("tiny_top1", 1, 3, 7, 256);
        assert_eq!((x.len(), y.len()), (21, 21));
        for b in 0..3 {
            let (x, y) = (&x[b * 7..b * 7 + 7], &y[b * 7..b * 7 + 7]);
            assert_eq!(x[1..], y[..6]);
            for (a, b) in x.iter().zip(y) {
                assert!((b + 256 * 6 - 5 * a - 17) % 256 < 4, "{a} -> {b}");
            }
        }
    }
}
