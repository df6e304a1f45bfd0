package mail

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	netmail "net/mail"
	"strings"

	"mailproof/system/contract"
)

// ResendTagKey is the tag under which a mail's key stands at Resend. Webhooks and
// the mail itself give it back.
const ResendTagKey = "dedupe"

// maxTaggedKey is how long a key may be to fit a tag of 256 characters.
const maxTaggedKey = 192

// ResendTag is the tag's value for a key: base64url, since tags take no colons.
// A key that is too long for it is hashed, and cannot be read back.
func ResendTag(dedupeKey string) string {
	if len(dedupeKey) > maxTaggedKey {
		sum := sha256.Sum256([]byte(dedupeKey))
		return hex.EncodeToString(sum[:16])
	}
	return base64.RawURLEncoding.EncodeToString([]byte(dedupeKey))
}

// ResendTagged is the key of a tag; false for one that is none of ours.
func ResendTagged(tag string) (dedupeKey string, ok bool) {
	b, err := base64.RawURLEncoding.DecodeString(tag)
	key := string(b)
	return key, err == nil && checkKey(key) == nil && ResendTag(key) == tag
}

type resendTag struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// RenderResend makes the same mail for the Resend API: Message.Bytes is the JSON
// body of the request, stored and sent byte for byte. The key is not among the
// mail's headers as Idempotency-Key: there nobody looks for it (OB-05).
// X-Dedupe-Key is for logs and people.
func (r *Renderer) RenderResend(in Rendering) (Message, error) {
	m, err := r.renderResend(in)
	if err != nil {
		return Message{}, &PermanentError{Failure{Stage: StageRender, Err: err}}
	}
	return m, nil
}

func (r *Renderer) renderResend(in Rendering) (Message, error) {
	if _, err := ParseAddress(in.To); err != nil {
		return Message{}, err
	}
	if err := checkKey(in.DedupeKey); err != nil {
		return Message{}, err
	}
	p, err := r.parts(in)
	if err != nil {
		return Message{}, err
	}
	from := netmail.Address{Name: strings.ReplaceAll(oneLine(r.cfg.FromName), `\`, "/"), Address: r.cfg.From}
	sender := r.cfg.From
	if from.Name != "" {
		sender = from.String()
	}
	headers := map[string]string{
		"Auto-Submitted":             "auto-generated", // RFC 3834
		contract.MailHeaderDedupeKey: in.DedupeKey,
	}
	for _, h := range r.listHeaders(in) {
		headers[h[0]] = h[1]
	}
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	// The order of the fields is that on the wire.
	err = enc.Encode(struct {
		From    string            `json:"from"`
		To      []string          `json:"to"`
		Subject string            `json:"subject"`
		HTML    string            `json:"html"`
		Text    string            `json:"text"`
		Headers map[string]string `json:"headers"` // encoding/json sorts the names
		Tags    []resendTag       `json:"tags"`
	}{
		From: sender, To: []string{in.To}, Subject: p.subject, HTML: p.markup, Text: p.text,
		Headers: headers,
		Tags:    []resendTag{{ResendTagKey, ResendTag(in.DedupeKey)}},
	})
	if err != nil {
		return Message{}, fmt.Errorf("compose: %w", err)
	}
	return Message{From: r.cfg.From, To: in.To, IdempotencyKey: in.DedupeKey, Bytes: bytes.TrimSuffix(out.Bytes(), []byte{'\n'})}, nil
}
