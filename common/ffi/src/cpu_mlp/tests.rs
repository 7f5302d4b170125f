//! Against libtorch's own operations, in f64.
use super::*;

fn random(shape: [i64; 2], kind: Kind) -> Tensor {
    (Tensor::randn(shape, (Kind::Float, Device::Cpu)) / (shape[1] as f64).sqrt()).to_kind(kind)
}

struct Weights(Tensor, Tensor, Tensor);

impl Weights {
    fn new(hidden: i64, intermediate: i64, kind: Kind) -> Self {
        Self(
            random([intermediate, hidden], kind),
            random([intermediate, hidden], kind),
            random([hidden, intermediate], kind),
        )
    }

    fn stored(&self) -> StoredMlp {
        StoredMlp::new(&self.0, &self.1, &self.2).unwrap()
    }

    fn plain(&self, x: &Tensor) -> Tensor {
        let wide = |tensor: &Tensor| tensor.to_kind(Kind::Double);
        let gate = wide(x).matmul(&wide(&self.0).tr());
        (gate.silu() * wide(x).matmul(&wide(&self.1).tr())).matmul(&wide(&self.2).tr())
    }
}

#[test]
fn sums_of_mlps_equal_plain_ones() {
    tch::manual_seed(3);
    for threads in [1, 3] {
        let crew = Crew::new(threads).unwrap();
        for (kind, dots) in [
            (Kind::Float, Dots::WhereTheyAre),
            (Kind::BFloat16, Dots::WhereTheyAre),
            (Kind::BFloat16, Dots::Never),
        ] {
            for (hidden, intermediate) in [(1, 1), (16, 32), (37, 21), (64, 192), (260, 7)] {
                let experts: Vec<Weights> =
                    (0..3).map(|_| Weights::new(hidden, intermediate, kind)).collect();
                let stored: Vec<StoredMlp> = experts.iter().map(Weights::stored).collect();
                let x = Tensor::randn([7, hidden], (Kind::Float, Device::Cpu)).to_kind(kind);
                let rows: [&[i64]; 3] = [&[0, 2, 3, 4, 5, 6, 1], &[], &[6, 0, 0]];
                let scales: [&[f32]; 3] = [&[1.0, 0.5, 2.0, -1.0, 0.0, 3.0, 0.25], &[], &[1.0, 0.5, 0.25]];
                let mlps: Vec<MlpRows<'_>> =
                    (0..3).map(|i| MlpRows { mlp: &stored[i], rows: rows[i], scales: scales[i] }).collect();
                let sum = gated(&x, &mlps, &crew, dots).unwrap();
                let expected = Tensor::zeros([7, hidden], (Kind::Double, Device::Cpu));
                for i in 0..3 {
                    for (&row, &scale) in rows[i].iter().zip(scales[i]) {
                        let mut to = expected.narrow(0, row, 1);
                        to += experts[i].plain(&x.narrow(0, row, 1)) * f64::from(scale);
                    }
                }
                let off = (sum.to_kind(Kind::Double) - &expected).abs().max().double_value(&[]);
                assert!(off < 2e-5, "{kind:?} {dots:?} {hidden} x {intermediate}: off by {off}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let weights = Weights::new(8, 4, Kind::Float);
    let refused = |gate: &Tensor, up: &Tensor, down: &Tensor| StoredMlp::new(gate, up, down).is_err();
    assert!(refused(&weights.2, &weights.1, &weights.0));
    assert!(refused(&weights.0, &weights.1, &weights.0.tr()), "not contiguous");
    assert!(refused(&weights.0, &weights.1.to_kind(Kind::BFloat16), &weights.2));
    assert!(refused(&weights.0.to_kind(Kind::Double), &weights.1, &weights.2));

    let (mlp, crew) = (weights.stored(), Crew::new(1).unwrap());
    let x = random([2, 8], Kind::Float);
    let run = |x: &Tensor, rows: &[i64], scales: &[f32]| {
        gated_mlps(x, &[MlpRows { mlp: &mlp, rows, scales }], &crew).map(|out| out.size())
    };
    assert!(run(&x, &[2], &[1.0]).is_err() && run(&x, &[-1], &[1.0]).is_err());
    assert!(run(&x, &[0, 1], &[1.0]).is_err());
    assert!(run(&x.to_kind(Kind::BFloat16), &[0], &[1.0]).is_err());
    assert!(run(&random([2, 9], Kind::Float), &[0], &[1.0]).is_err());
    assert_eq!(run(&x, &[0], &[1.0]), Ok(vec![2, 8]));
    assert_eq!(run(&x.narrow(0, 0, 0), &[], &[]), Ok(vec![0, 8]));
}
