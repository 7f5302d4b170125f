//! The oracle itself: it accepts the reference's own tokens and refuses others.
use afd_tests::fixtures::{self, ALL};
use afd_tests::monolith::Monolith;
use afd_tests::oracle;
use tch::Kind;

#[test]
fn accepts_what_the_reference_chose_for_every_family() -> anyhow::Result<()> {
    for name in ALL {
        let monolith = Monolith::load(&fixtures::checkpoint(name), Kind::Float)?;
        for prompt in fixtures::expected(name)?.prompts {
            let verdict = oracle::judge(&monolith, &prompt.input_ids, &prompt.generated_ids, Kind::Float)
                .map_err(|error| error.context(format!("{name}: {}", prompt.id)))?;
            assert_eq!(
                (verdict.num_tokens, verdict.worst_gap),
                (prompt.generated_ids.len(), 0.0),
                "{name}: {}",
                prompt.id
            );
        }
    }
    Ok(())
}

#[test]
fn refuses_one_wrong_token_anywhere() -> anyhow::Result<()> {
    let name = "tiny-mixtral";
    let monolith = Monolith::load(&fixtures::checkpoint(name), Kind::Float)?;
    let prompt = fixtures::expected(name)?.prompts.remove(0);
    for at in [0, 1, 15, 31] {
        let mut emitted = prompt.generated_ids.clone();
        emitted[at] = (emitted[at] + 1) % monolith.config.vocab_size as u32;
        assert!(oracle::judge(&monolith, &prompt.input_ids, &emitted, Kind::Float).is_err(), "wrong at {at}");
        assert!(oracle::same(&prompt.generated_ids, &emitted).is_err(), "wrong at {at}");
    }
    assert!(oracle::judge(&monolith, &prompt.input_ids, &[], Kind::Float).is_err(), "nothing emitted");
    Ok(())
}

#[test]
fn smollm2_dense_and_moe_choose_the_recorded_tokens() -> anyhow::Result<()> {
    for name in ["smollm2-135m", "smollm2-135m-moe"] {
        let Some(folder) = fixtures::smollm2(name) else {
            println!("SKIPPED: {name} is not there; deploy/model.sh makes it");
            continue;
        };
        let monolith = Monolith::load(&folder, Kind::Float)?;
        for prompt in fixtures::expected("smollm2-135m")?.prompts {
            oracle::judge(&monolith, &prompt.input_ids, &prompt.generated_ids, Kind::Float)
                .map_err(|error| error.context(format!("{name}: {}", prompt.id)))?;
        }
    }
    Ok(())
}
