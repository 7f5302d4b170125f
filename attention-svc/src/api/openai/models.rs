//! `GET /v1/models`: the one model that is served.
use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use super::super::Api;
use super::super::error::ApiError;

/// The list.
pub(crate) async fn list(State(api): State<Arc<Api>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [model(&api)]}))
}

/// One entry.
pub(crate) async fn retrieve(
    State(api): State<Arc<Api>>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(id) = id.map_err(|error| ApiError::Malformed(format!("the path: {}", error.body_text())))?;
    api.check_model(Some(&id))?;
    Ok(Json(model(&api)))
}

fn model(api: &Api) -> Value {
    json!({
        "id": api.model.name,
        "object": "model",
        "created": api.started,
        "owned_by": "afd",
        "max_model_len": api.model.limits.max_model_len,
        "architecture": api.model.identity.architecture,
    })
}
