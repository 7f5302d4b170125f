//! Against libtorch's own product, in f64, over odd shapes.
use super::*;

fn random(shape: [i64; 2], kind: Kind) -> Tensor {
    (Tensor::randn(shape, (Kind::Float, Device::Cpu)) / (shape[1].max(1) as f64).sqrt()).to_kind(kind)
}

fn off(found: &Tensor, expected: &Tensor) -> f64 {
    if found.numel() == 0 {
        return 0.0;
    }
    (found.to_kind(Kind::Double) - expected).abs().max().double_value(&[])
}

#[test]
fn products_equal_plain_ones_for_any_shape() {
    tch::manual_seed(5);
    for threads in [1, 3] {
        let crew = Crew::new(threads).unwrap();
        for (kind, dots) in [
            (Kind::Float, Dots::WhereTheyAre),
            (Kind::BFloat16, Dots::WhereTheyAre),
            (Kind::BFloat16, Dots::Never),
        ] {
            for (rows, columns) in
                [(1, 1), (4, 32), (37, 21), (192, 64), (7, 260), (1030, 96), (5, 0), (0, 8)]
            {
                for num_rows in [0, 1, 2, 3, 4, 5, 7, 8, 11, 16, 17] {
                    let (weight, x) = (
                        random([rows, columns], kind),
                        Tensor::randn([num_rows, columns], (Kind::Float, Device::Cpu)).to_kind(kind),
                    );
                    let stored = StoredMatrix::new(&weight).unwrap();
                    let exact = x.to_kind(Kind::Double).matmul(&weight.to_kind(Kind::Double).tr());
                    let wide = linear_with(&x, &stored, None, Kind::Float, &crew, dots).unwrap();
                    assert_eq!((wide.size(), wide.kind()), (vec![num_rows, rows], Kind::Float));
                    let what = format!("{kind:?} {dots:?} {num_rows} times {rows} x {columns}");
                    assert!(off(&wide, &exact) < 2e-5, "{what}: off by {}", off(&wide, &exact));
                    // Rounded once, whatever was added: the same as the exact sum rounded, up to a tie.
                    let onto = random([num_rows, rows.max(1)], kind).narrow(1, 0, rows);
                    let sum = linear_with(&x, &stored, Some(&onto), kind, &crew, dots).unwrap();
                    let exact = exact + onto.to_kind(Kind::Double);
                    let ulp = if kind == Kind::BFloat16 { 1.0 / 256.0 } else { 2e-6 };
                    let allowed = (exact.abs() * ulp + 2e-5).to_kind(Kind::Double);
                    let worst = off(&((&sum.to_kind(Kind::Double) - &exact) / &allowed), &exact.zeros_like());
                    assert!(worst <= 1.0, "{what}, added: {worst} of what rounding allows");
                }
            }
        }
    }
}

#[test]
fn rows_that_do_not_lie_together_are_the_same() {
    let (weight, crew) = (random([6, 8], Kind::BFloat16), Crew::new(2).unwrap());
    let stored = StoredMatrix::new(&weight).unwrap();
    let x = random([8, 3], Kind::BFloat16);
    let found = linear(&x.tr(), &stored, None, Kind::Float, &crew).unwrap();
    let together = linear(&x.tr().contiguous(), &stored, None, Kind::Float, &crew).unwrap();
    assert_eq!(found, together);
}

#[test]
fn what_does_not_fit_is_refused() {
    let weight = random([6, 8], Kind::Float);
    assert!(StoredMatrix::new(&weight.tr()).is_err(), "not contiguous");
    assert!(StoredMatrix::new(&weight.to_kind(Kind::Double)).is_err());
    assert!(StoredMatrix::new(&weight.view([6, 8, 1])).is_err());
    let (stored, crew) = (StoredMatrix::new(&weight).unwrap(), Crew::new(1).unwrap());
    let run = |x: &Tensor, onto: Option<&Tensor>, kind| linear(x, &stored, onto, kind, &crew).is_ok();
    let x = random([2, 8], Kind::Float);
    assert!(run(&x, None, Kind::Float));
    assert!(!run(&random([2, 9], Kind::Float), None, Kind::Float));
    assert!(!run(&x.to_kind(Kind::BFloat16), None, Kind::Float), "weights of another dtype");
    assert!(!run(&x, None, Kind::BFloat16));
    assert!(!run(&x, Some(&random([2, 5], Kind::Float)), Kind::Float));
    assert!(!run(&x, Some(&random([2, 6], Kind::BFloat16)), Kind::Float));
}
