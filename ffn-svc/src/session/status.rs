//! The one place where refusals of the control plane become gRPC statuses, each with a typed detail
//! (`google.rpc.ErrorInfo`: a reason, and the values as metadata) beside its sentence.
use std::collections::HashMap;

use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use super::handshake::Refusal;
use super::plans::PlanError;
use super::registry::NotAdmitted;
use crate::engine::HopError;

/// Domain of the reasons in details.
const DOMAIN: &str = "afd.v1";

impl From<Refusal> for Status {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.to_string();
        let (code, reason, values) = match refusal {
            Refusal::Differs { field, caller, own, .. } => {
                let values = vec![("field", field.to_owned()), ("caller", caller), ("own", own)];
                (Code::FailedPrecondition, "JOIN_DIFFERS", values)
            }
            Refusal::NothingInCommon { field, caller, own } => {
                let values = vec![("field", field.to_owned()), ("caller", caller), ("own", own)];
                (Code::FailedPrecondition, "JOIN_NOTHING_IN_COMMON", values)
            }
            Refusal::Role { found } => {
                let values = vec![("field", "identity.role".to_owned()), ("caller", found.to_string())];
                (Code::FailedPrecondition, "JOIN_ROLE", values)
            }
            Refusal::Invalid { field, .. } => {
                (Code::InvalidArgument, "JOIN_INVALID", vec![("field", field.to_owned())])
            }
            Refusal::Token { .. } => (Code::Unauthenticated, "JOIN_TOKEN", Vec::new()),
        };
        detailed(code, message, reason, values)
    }
}

impl From<NotAdmitted> for Status {
    fn from(refused: NotAdmitted) -> Self {
        let message = refused.to_string();
        match refused {
            NotAdmitted::Live { live, caller, .. } => {
                let values = vec![("live", live.to_string()), ("caller", caller.to_string())];
                // Trying again helps once the other is gone or its lease has ended.
                detailed(Code::AlreadyExists, message, "JOIN_RANK_IS_LIVE", values)
            }
            NotAdmitted::Fenced { newer, caller, .. } => {
                let values = vec![("newer", newer.to_string()), ("caller", caller.to_string())];
                detailed(Code::FailedPrecondition, message, "JOIN_FENCED", values)
            }
            NotAdmitted::Full => detailed(Code::ResourceExhausted, message, "JOIN_FULL", Vec::new()),
        }
    }
}

impl From<PlanError> for Status {
    fn from(error: PlanError) -> Self {
        let (code, reason, step) = match &error {
            PlanError::Repeated { step, .. } => (Code::InvalidArgument, "PLAN_REPEATED", step),
            PlanError::Backwards { step, .. } => (Code::InvalidArgument, "PLAN_BACKWARDS", step),
            PlanError::Over { step } => (Code::InvalidArgument, "PLAN_OVER", step),
            PlanError::Stages { step, .. } => (Code::InvalidArgument, "PLAN_STAGES", step),
            PlanError::Tokens { step, .. } => (Code::InvalidArgument, "PLAN_TOKENS", step),
            PlanError::Phase { step, .. } => (Code::InvalidArgument, "PLAN_PHASE", step),
            PlanError::CaptureAndReplay { step } => (Code::InvalidArgument, "PLAN_CAPTURE_AND_REPLAY", step),
            PlanError::Fenced { step, .. } => (Code::FailedPrecondition, "PLAN_FENCED", step),
        };
        detailed(code, error.to_string(), reason, vec![("step", step.to_string())])
    }
}

impl From<HopError> for Status {
    fn from(error: HopError) -> Self {
        detailed(error.code(), error.to_string(), "HOP", vec![("what", error.reason().to_owned())])
    }
}

/// A status with its reason.
pub(crate) fn detailed(
    code: Code,
    message: impl Into<String>,
    reason: &str,
    values: Vec<(&str, String)>,
) -> Status {
    let values: HashMap<_, _> = values.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
    Status::with_error_details(code, message, ErrorDetails::with_error_info(reason, DOMAIN, values))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn details_carry_the_reason_and_both_values() {
        let (field, caller, own) = ("shard_count", "2".to_owned(), "3".to_owned());
        let refusal = Refusal::Differs { field, caller, own, options: "--shard" };
        assert_eq!(
            refusal.to_string(),
            "`shard_count` differs: the caller has 2, this FFN rank has 3 (--shard)"
        );
        let status = Status::from(refusal);
        assert_eq!(status.code(), Code::FailedPrecondition);
        let info = status.get_details_error_info().unwrap();
        assert_eq!((info.reason.as_str(), info.domain.as_str()), ("JOIN_DIFFERS", "afd.v1"));
        assert_eq!((info.metadata["field"].as_str(), info.metadata["own"].as_str()), ("shard_count", "3"));
    }
}
