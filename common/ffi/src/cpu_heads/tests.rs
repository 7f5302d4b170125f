//! Against libtorch's batched products, in f64, over odd shapes.
use super::*;

fn random(shape: &[i64], kind: Kind) -> Tensor {
    (Tensor::rand(shape, (Kind::Float, Device::Cpu)) - 0.5).to_kind(kind)
}

fn assert_close(found: &Tensor, exact: &Tensor, kind: Kind, what: &str) {
    assert_eq!(found.size(), exact.size(), "{what}");
    if found.numel() == 0 {
        return;
    }
    let ulp = if kind == Kind::BFloat16 { 1.0 / 256.0 } else { 1e-6 };
    let allowed = exact.abs() * ulp + 2e-5;
    let worst = ((found.to_kind(Kind::Double) - exact) / allowed).abs().max().double_value(&[]);
    assert!(worst <= 1.0, "{what}: {worst} of what rounding allows");
}

#[test]
fn both_ways_equal_batched_products_for_any_shape() {
    tch::manual_seed(6);
    for threads in [1, 3] {
        let crew = Crew::new(threads).unwrap();
        for kind in [Kind::Float, Kind::BFloat16] {
            for (heads, rows, columns) in
                [(1, 1, 1), (3, 8, 32), (2, 13, 37), (5, 24, 512), (4, 3, 20), (2, 130, 96)]
            {
                for num_rows in [0, 1, 2, 5, 16] {
                    let what = format!("{kind:?} {heads} x {rows} x {columns}, {num_rows} rows");
                    // A part of a larger matrix, as W_UK and W_UV are.
                    let weight = random(&[heads, rows + 3, columns], kind).narrow(1, 2, rows);
                    let stored = StoredHeads::new(&weight).unwrap();
                    let wide = weight.to_kind(Kind::Double);
                    let x = random(&[num_rows, heads, rows + 1], kind).narrow(2, 1, rows);
                    let exact = x.to_kind(Kind::Double).transpose(0, 1).bmm(&wide).transpose(0, 1);
                    assert_close(&into_columns(&x, &stored, &crew).unwrap(), &exact, kind, &what);
                    let x = random(&[heads, num_rows, columns], kind);
                    let exact = x.to_kind(Kind::Double).bmm(&wide.transpose(1, 2)).transpose(0, 1);
                    let exact = exact.reshape([num_rows, heads * rows]);
                    assert_close(&into_rows(&x, &stored, &crew).unwrap(), &exact, kind, &what);
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused() {
    let weight = random(&[2, 4, 6], Kind::Float);
    assert!(StoredHeads::new(&weight.transpose(1, 2)).is_err(), "not contiguous");
    assert!(StoredHeads::new(&weight.to_kind(Kind::Double)).is_err());
    assert!(StoredHeads::new(&weight.view([8, 6])).is_err());
    let (stored, crew) = (StoredHeads::new(&weight).unwrap(), Crew::new(1).unwrap());
    assert!(into_columns(&random(&[3, 2, 4], Kind::Float), &stored, &crew).is_ok());
    assert!(into_columns(&random(&[3, 2, 5], Kind::Float), &stored, &crew).is_err());
    assert!(into_columns(&random(&[3, 1, 4], Kind::Float), &stored, &crew).is_err());
    assert!(into_columns(&random(&[3, 2, 4], Kind::BFloat16), &stored, &crew).is_err());
    assert!(into_rows(&random(&[2, 3, 6], Kind::Float), &stored, &crew).is_ok());
    assert!(
        into_rows(&random(&[3, 2, 6], Kind::Float).transpose(0, 1), &stored, &crew).is_err(),
        "not contiguous"
    );
    assert!(into_rows(&random(&[2, 3, 4], Kind::Float), &stored, &crew).is_err());
    assert!(into_rows(&random(&[2, 3, 6], Kind::BFloat16), &stored, &crew).is_err());
}
