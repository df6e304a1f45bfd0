package scenarios

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"time"
)

// hook is a webhook at the mail API. The system must know its secret before it
// starts, and the API the system's address afterwards: so it is made first and
// aimed later.
type hook struct{ api, id, secret string }

func newHook(api string) (hook, error) {
	var made struct {
		ID     string `json:"id"`
		Secret string `json:"signing_secret"`
	}
	err := callAPI(http.MethodPost, api+"/webhooks", map[string]any{
		"endpoint": "http://127.0.0.1:9/not-yet",
		"events":   []string{"email.sent", "email.delivered", "email.bounced", "email.complained", "email.suppressed", "email.failed"},
	}, &made)
	return hook{api, made.ID, made.Secret}, err
}

func (h hook) aim(endpoint string) error {
	return callAPI(http.MethodPatch, h.api+"/webhooks/"+h.id, map[string]any{"endpoint": endpoint}, &struct{}{})
}

func callAPI(method, url string, body, into any) error {
	raw, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("webhook: %w", err)
	}
	req, err := http.NewRequest(method, url, bytes.NewReader(raw))
	if err != nil {
		return fmt.Errorf("webhook: %w", err)
	}
	req.Header.Set("Authorization", "Bearer re_harness")
	req.Header.Set("User-Agent", "mailproof")
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("webhook: %w", err)
	}
	defer func() { _ = resp.Body.Close() }() // only read
	if resp.StatusCode >= 300 {
		return fmt.Errorf("webhook: %s answered %s", url, resp.Status)
	}
	if err := json.NewDecoder(resp.Body).Decode(into); err != nil {
		return fmt.Errorf("webhook: %w", err)
	}
	return nil
}
