//! Rows beside values worked out by hand.
use tch::{Device, Kind, Tensor};

use super::{GqaRows, GqaShape, MlaRows, Pairing, QkNorms, RopeRows, gqa_rows, mla_rows};

fn numbers(x: &Tensor) -> Vec<f32> {
    Vec::try_from(x.to_kind(Kind::Float).contiguous().view(-1)).unwrap()
}

#[test]
fn both_pairings_turn_by_the_angle() {
    let (cos, sin) = ([0.6, 1.0], [0.8, 0.0]);
    let rope = |pairing| RopeRows { cos: &cos, sin: &sin, half: 2, pairing };
    let mut halves = [1.0, 2.0, 3.0, 4.0];
    rope(Pairing::Halves).turn(0, &mut halves);
    let expected = [0.6 - 3.0 * 0.8, 2.0, 3.0 * 0.6 + 0.8, 4.0];
    assert!(halves.iter().zip(expected).all(|(a, b): (&f32, f32)| (a - b).abs() < 1e-6), "{halves:?}");
    let mut neighbours = [1.0, 2.0, 3.0, 4.0];
    rope(Pairing::Neighbours).turn(0, &mut neighbours);
    let expected = [0.6 - 2.0 * 0.8, 2.0 * 0.6 + 0.8, 3.0, 4.0];
    assert!(
        neighbours.iter().zip(expected).all(|(a, b): (&f32, f32)| (a - b).abs() < 1e-6),
        "{neighbours:?}"
    );
}

#[test]
fn keys_and_values_land_in_their_slots_normed_clipped_and_turned() {
    tch::no_grad(|| {
        let shape = GqaShape { num_heads: 2, num_kv_heads: 1, head_dim: 2 };
        let qkv = Tensor::from_slice(&[3.0f32, 4.0, 0.0, 2.0, 6.0, 8.0, 9.0, -9.0]).view([1, 8]);
        let keys = Tensor::zeros([2, 3, 1, 2], (Kind::Float, Device::Cpu));
        let values = keys.zeros_like();
        let norms = QkNorms { query: &[1.0, 2.0], key: &[1.0, 1.0], eps: 0.0 };
        let rope = RopeRows { cos: &[0.0], sin: &[1.0], half: 1, pairing: Pairing::Halves };
        let rules = GqaRows { shape, norms: Some(norms), clip: Some(1.0), rope, slots: &[4] };
        gqa_rows(&qkv, &rules, &keys, &values).unwrap();
        let r = 12.5f32.sqrt();
        // Each head over its root mean square, times its weight, clipped to 1, then turned by a quarter.
        let expected = [-1.0, 3.0 / r, -1.0, 0.0, -1.0, 6.0 / (2.0 * r), 1.0, -1.0];
        for (a, b) in numbers(&qkv).iter().zip(expected) {
            assert!((a - b).abs() < 1e-6, "{a} {b}");
        }
        let slot = |cache: &Tensor, slot: i64| numbers(&cache.view([6, 2]).get(slot));
        assert_eq!(slot(&keys, 4), numbers(&qkv)[4..6]);
        assert_eq!(slot(&values, 4), [1.0, -1.0]);
        assert!((0..6).filter(|s| *s != 4).all(|s| slot(&keys, s) == [0.0, 0.0]));
        let beyond = GqaRows { norms: None, clip: None, slots: &[6], ..rules };
        let refused = gqa_rows(&qkv, &beyond, &keys, &values).unwrap_err();
        assert_eq!(refused.to_string(), "keys: slot 6 of 6");
    });
}

#[test]
fn a_latent_row_is_normed_turned_and_cached_and_left_alone() {
    tch::no_grad(|| {
        for kind in [Kind::Float, Kind::BFloat16] {
            let joined =
                Tensor::from_slice(&[1.0f32, 2.0, 3.0, 4.0, 3.0, 4.0, 5.0, 6.0]).view([1, 8]).to_kind(kind);
            let queries = joined.narrow(1, 0, 4).view([1, 1, 4]);
            let cache = Tensor::zeros([1, 2, 4], (kind, Device::Cpu));
            let rope = RopeRows { cos: &[0.0], sin: &[1.0], half: 1, pairing: Pairing::Neighbours };
            let rules = MlaRows { norm: &[2.0, 2.0], eps: 0.0, rope, slots: &[1] };
            mla_rows(&queries, &joined.narrow(1, 4, 4), &rules, &cache).unwrap();
            assert_eq!(numbers(&joined), [1.0, 2.0, -4.0, 3.0, 3.0, 4.0, 5.0, 6.0]);
            let r = 12.5f32.sqrt();
            for (a, b) in numbers(&cache.view([2, 4]).get(1)).iter().zip([6.0 / r, 8.0 / r, -6.0, 5.0]) {
                assert!((a - b).abs() < 1e-2, "{a} {b}");
            }
        }
    });
}
