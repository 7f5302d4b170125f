//! `InferenceService` and `MembershipService` on the wrong role: every call fails at once and says whom to ask.
use afd_common::proto::v1;
use afd_common::proto::v1::inference_service_server::InferenceService;
use afd_common::proto::v1::membership_service_server::MembershipService;
use tonic::{Code, Request, Response, Status};

use crate::session::status::detailed;

/// See the module's head.
#[derive(Clone)]
pub(super) struct WrongRole {
    sentence: String,
}

/// What a caller is told.
pub(super) fn sentence(identity: &v1::Identity) -> String {
    format!(
        "this is ffn-svc: rank F{} of deployment `{}`, role FFN, which holds experts and neither generates nor samples; \
         send this call to an attention-svc of the deployment (role ATTENTION)",
        identity.rank, identity.deployment
    )
}

impl WrongRole {
    pub(super) fn new(identity: &v1::Identity) -> Self {
        Self { sentence: sentence(identity) }
    }

    fn refusal<T>(&self) -> Result<Response<T>, Status> {
        let values = vec![("role", "ROLE_FFN".to_owned()), ("wanted", "ROLE_ATTENTION".to_owned())];
        Err(detailed(Code::FailedPrecondition, self.sentence.clone(), "WRONG_ROLE", values))
    }
}

#[tonic::async_trait]
impl InferenceService for WrongRole {
    type GenerateStream = futures::stream::Empty<Result<v1::GenerateResponse, Status>>;

    async fn generate(
        &self,
        _: Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        self.refusal()
    }

    async fn tokenize(
        &self,
        _: Request<v1::TokenizeRequest>,
    ) -> Result<Response<v1::TokenizeResponse>, Status> {
        self.refusal()
    }

    async fn detokenize(
        &self,
        _: Request<v1::DetokenizeRequest>,
    ) -> Result<Response<v1::DetokenizeResponse>, Status> {
        self.refusal()
    }

    async fn get_model_info(
        &self,
        _: Request<v1::GetModelInfoRequest>,
    ) -> Result<Response<v1::GetModelInfoResponse>, Status> {
        self.refusal()
    }

    async fn abort(&self, _: Request<v1::AbortRequest>) -> Result<Response<v1::AbortResponse>, Status> {
        self.refusal()
    }
}

#[tonic::async_trait]
impl MembershipService for WrongRole {
    async fn announce(
        &self,
        _: Request<v1::AnnounceRequest>,
    ) -> Result<Response<v1::AnnounceResponse>, Status> {
        self.refusal()
    }

    async fn leave(&self, _: Request<v1::LeaveRequest>) -> Result<Response<v1::LeaveResponse>, Status> {
        self.refusal()
    }

    async fn list_peers(
        &self,
        _: Request<v1::ListPeersRequest>,
    ) -> Result<Response<v1::ListPeersResponse>, Status> {
        self.refusal()
    }
}
