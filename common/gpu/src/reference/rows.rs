//! Norm and argmax of a row.
use half::bf16;

/// `row / rms(row) * weight`, the normed value rounded before it is scaled.
pub fn rms_norm(row: &[bf16], weight: &[bf16], epsilon: f64) -> Vec<f64> {
    let square: f64 = row.iter().map(|v| f64::from(v.to_f32()).powi(2)).sum();
    let factor = 1.0 / (square / row.len() as f64 + epsilon).sqrt();
    let normed = row.iter().map(|v| bf16::from_f64(f64::from(v.to_f32()) * factor));
    normed.zip(weight).map(|(n, w)| f64::from(n.to_f32()) * f64::from(w.to_f32())).collect()
}

/// The index of the largest, the lowest on ties.
pub fn argmax(row: &[bf16]) -> usize {
    let mut best = 0;
    for (i, v) in row.iter().enumerate() {
        if *v > row[best] {
            best = i;
        }
    }
    best
}
