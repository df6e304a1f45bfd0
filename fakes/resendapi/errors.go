package resendapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
)

// APIError is one line of Resend's published table of errors.
type APIError struct {
	Status  int
	Name    string
	Message string
}

func (e *APIError) Error() string { return fmt.Sprintf("%d %s: %s", e.Status, e.Name, e.Message) }

// body is the error as Resend writes it; recordings of live replies have the
// fields in this order.
func (e *APIError) body() []byte {
	return marshal(struct {
		StatusCode int    `json:"statusCode"`
		Message    string `json:"message"`
		Name       string `json:"name"`
	}{e.Status, e.Message, e.Name})
}

// saying is the error with a message of its own.
func (e *APIError) saying(format string, args ...any) *APIError {
	return &APIError{e.Status, e.Name, fmt.Sprintf(format, args...)}
}

// marshal writes JSON without the escapes for HTML, which Resend does not use
// either. v must be encodable: all callers pass structs of this package.
func marshal(v any) []byte {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return []byte(`{"statusCode":500,"message":"An unexpected error occurred.","name":"application_error"}`)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// Errors is the table of errors: what this server answers by itself, then what
// only a rule can make it answer. Among several of a name the first one is what
// a rule gets that names no code. Messages are Resend's, word for word.
func Errors() []APIError {
	return []APIError{
		{400, "invalid_idempotency_key", "Idempotency keys, if present, must have between 1 and 256 characters."},
		{422, "validation_error", "An error was found with one or more fields in the request."},
		{400, "validation_error", "An error was found with one or more fields in the request."},
		{401, "missing_api_key", "Missing API key in the authorization header."},
		{401, "restricted_api_key", "This API key is restricted to only send emails."},
		{401, "validation_error", "API key is invalid"},
		{403, "restricted_api_key", "API key is not active"},
		{403, "suspended_api_key", "This API key is suspended"},
		{403, "invalid_permission", "Access token is missing required scopes."},
		{403, "validation_error", "The `domain.com` domain is not verified. Please, add and verify your domain."},
		{404, "not_found", "The requested endpoint does not exist."},
		{405, "method_not_allowed", "Method is not allowed for the requested path."},
		{409, "concurrent_idempotent_requests", "There is another request in progress with the same idempotency key."},
		{409, "invalid_idempotent_request", "This idempotency key has been used with this HTTP method and endpoint within the last 24 hours, but the request body was modified and doesn't match the original request."},
		{409, "resource_locked", "Another request is already updating this resource."},
		{422, "invalid_attachment", "Attachment must have either a `content` or `path`."},
		{422, "invalid_parameter", "The `parameter` must be a valid UUID."},
		{422, "missing_required_field", "The request body is missing one or more required fields."},
		{422, "missing_required_parameter", "The request is missing one or more required parameters."},
		{429, "rate_limit_exceeded", "Too many requests. Please limit the number of requests per second. Or contact support to increase rate limit."},
		{429, "daily_quota_exceeded", "You have exceeded your daily email sending quota."},
		{429, "monthly_quota_exceeded", "You have exceeded your monthly email sending quota."},
		{500, "application_error", "An unexpected error occurred."},
		{503, "service_unavailable", "API is temporarily unavailable"},
		// No longer on the page, still decoded by the SDKs.
		{403, "invalid_api_key", "API key is invalid."},
		{422, "invalid_from_address", "Invalid `from` field."},
		{422, "invalid_access", "Access must be \"full_access\" | \"sending_access\"."},
		{422, "invalid_region", "Region must be \"us-east-1\" | \"eu-west-1\" | \"sa-east-1\"."},
		{451, "security_error", "We may have found a security issue with the request."},
		{500, "internal_server_error", "An unexpected error occurred."},
	}
}

// errorNamed finds an error of the table; status 0 fits any.
func errorNamed(status int, name string) (*APIError, bool) {
	for _, e := range Errors() {
		if e.Name == name && (status == 0 || e.Status == status) {
			return &e, true
		}
	}
	return nil, false
}

// usual is the error that goes with a bare status.
func usual(status int) *APIError {
	name := map[int]string{
		400: "validation_error", 401: "missing_api_key", 403: "suspended_api_key", 404: "not_found",
		405: "method_not_allowed", 409: "concurrent_idempotent_requests", 422: "validation_error",
		429: "rate_limit_exceeded", 451: "security_error", 500: "application_error", 503: "service_unavailable",
	}[status]
	if e, ok := errorNamed(status, name); ok {
		return e
	}
	return &APIError{status, "application_error", http.StatusText(status)}
}

// must is an error that the table is known to hold.
func must(status int, name string) *APIError {
	if e, ok := errorNamed(status, name); ok {
		return e
	}
	return &APIError{500, "application_error", "no error " + name}
}
