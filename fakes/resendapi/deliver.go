package resendapi

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"mailproof/fakes/script"
)

// Delivery is one try to deliver one event to one webhook.
type Delivery struct {
	ID      string    `json:"id"` // svix-id, the same on each try
	Webhook string    `json:"webhook"`
	URL     string    `json:"url"`
	Event   string    `json:"event"`
	EmailID string    `json:"email_id"`
	Key     string    `json:"key,omitempty"`
	Attempt int       `json:"attempt"`
	At      time.Time `json:"at"`               // on the movable clock
	Status  int       `json:"status,omitempty"` // of the answer; 0 for none
	Error   string    `json:"error,omitempty"`
	Fault   string    `json:"fault,omitempty"`
	// Next is when it is tried again, on the movable clock; nil when it was
	// delivered or given up.
	Next *time.Time `json:"next,omitempty"`
}

// deliveriesKept bounds the log of deliveries.
const deliveriesKept = 4096

// retries are the waits before each further try, as Resend documents them:
// any answer but 2xx is a failure.
var retries = []time.Duration{
	5 * time.Second, 5 * time.Minute, 30 * time.Minute, 2 * time.Hour, 5 * time.Hour, 10 * time.Hour, 10 * time.Hour,
}

// Deliveries lists the latest tries to deliver webhooks (4,096 at least),
// oldest first.
func (s *Server) Deliveries() []Delivery {
	s.hooks.mu.Lock()
	defer s.hooks.mu.Unlock()
	return append([]Delivery{}, s.hooks.log...)
}

func (k *hooks) note(h *webhook, m *message, d Delivery) {
	k.mu.Lock()
	defer k.mu.Unlock()
	d.ID, d.Webhook, d.Event, d.Key, d.Attempt, d.Fault = m.id, h.id, m.event, m.key, m.attempt, m.fault
	d.EmailID = k.s.ids.uuid(m.serial)
	d.URL, d.At = h.endpoint, k.s.wall()
	if len(k.log) >= 2*deliveriesKept {
		k.log = append(k.log[:0:0], k.log[deliveriesKept:]...)
	}
	k.log = append(k.log, d)
}

// deliver tries one message, as far as rules let it.
func (l *lane) deliver(m *message) {
	url, on := l.target(m)
	if !on {
		return
	}
	if !m.asked && !l.ask(m) {
		return
	}
	m.asked = false
	m.attempt++
	times := 1
	shift, forge := time.Duration(0), false
	for _, a := range m.strikes {
		switch a.Kind {
		case script.Duplicate:
			times = 2
		case BadSignature:
			forge = true
		case StaleTimestamp:
			shift = a.For.Or(10 * time.Minute)
		}
	}
	m.strikes = nil
	for range times {
		l.post(url, m, shift, forge)
	}
	l.overtaken(l.k.s.engine.Now())
}

// target says where the message goes, and whether it still does.
func (l *lane) target(m *message) (url string, on bool) {
	if e, ok := l.k.s.mails.get(m.serial); m.planned && (!ok || e.plan != m.plan || e.canceled) {
		return "", false
	}
	l.k.mu.Lock()
	defer l.k.mu.Unlock()
	h := l.hook
	return h.endpoint, h.status == "enabled" && slices.Contains(h.events, m.event)
}

// ask asks the rules about the next try; false when it is not made now.
func (l *lane) ask(m *message) bool {
	s := l.k.s
	m.fault, m.passed = "", false
	if s.engine.Quiet(m.to...) {
		return true
	}
	subject := "webhook:" + m.id
	strikes := s.engine.Decide(script.Event{
		Stage: StageWebhook, Sender: m.from, Recipients: m.to, Key: m.key, Subject: subject, Nth: s.engine.Try(subject),
		Header: func(name string) []string {
			if strings.EqualFold(name, ":type") {
				return []string{m.event}
			}
			return nil
		},
	})
	now, later := s.engine.Now(), false
	for _, st := range strikes {
		a := st.Action
		m.fault = joined(m.fault, a.Name())
		switch a.Kind {
		case script.Drop:
			m.attempt++
			l.k.note(l.hook, m, Delivery{Error: "lost by script"})
			return false
		case script.Delay:
			m.due, later = now+a.For.D(), true
		case script.Reorder:
			m.due, m.passed, later = now+a.For.Or(30*time.Second), true, true
		default:
			m.strikes = append(m.strikes, a)
		}
	}
	if later {
		m.asked = true
		l.push(m)
	}
	return !later
}

// post makes one try and plans the next if it fails.
func (l *lane) post(url string, m *message, shift time.Duration, forge bool) {
	s := l.k.s
	at := strconv.FormatInt(s.wall().Add(-shift).Unix(), 10)
	signature := sign(l.hook.secret, m.id, at, m.body)
	if forge {
		signature = sign("whsec_Zm9yZ2Vk", m.id, at, m.body)
	}
	status, err := l.k.client.post(l.stop, url, m.body, map[string]string{
		"svix-id": m.id, "svix-timestamp": at, "svix-signature": signature,
	})
	d := Delivery{Status: status}
	if err != nil {
		d.Error = err.Error()
	}
	if failed := err != nil || status < 200 || status > 299; failed && m.attempt <= len(retries) && !errors.Is(err, errRemote) {
		wait := retries[m.attempt-1]
		next := s.wall().Add(wait)
		d.Next = &next
		again := *m
		again.due, again.order = s.engine.Now()+wait, 0
		l.k.note(l.hook, m, d)
		l.push(&again)
		return
	}
	l.k.note(l.hook, m, d)
}

// sign makes a Svix signature: HMAC-SHA256 with the decoded secret over id,
// time and body.
func sign(secret, id, at string, body []byte) string {
	key, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(secret, "whsec_"))
	if err != nil {
		key = []byte(secret)
	}
	h := hmac.New(sha256.New, key)
	_, _ = h.Write([]byte(id + "." + at + "."))
	_, _ = h.Write(body)
	return "v1," + base64.StdEncoding.EncodeToString(h.Sum(nil))
}

// poster sends webhooks.
type poster struct {
	client  *http.Client
	timeout time.Duration
}

// errRemote keeps webhooks on this machine.
var errRemote = errors.New("not sent: the address is not a loopback one, and Options.RemoteWebhooks is off")

func newPoster(opt Options) *poster {
	dialer := &net.Dialer{Timeout: opt.WebhookTimeout}
	if !opt.RemoteWebhooks {
		// After the name was resolved and before anything is sent: whatever the
		// name, only loopback is reached.
		dialer.Control = func(_, address string, _ syscall.RawConn) error {
			host, _, err := net.SplitHostPort(address)
			if ip := net.ParseIP(host); err != nil || ip == nil || !ip.IsLoopback() {
				return errRemote
			}
			return nil
		}
	}
	return &poster{timeout: opt.WebhookTimeout, client: &http.Client{
		Transport: &http.Transport{DialContext: dialer.DialContext, MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute},
		CheckRedirect: func(*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse // a redirect is not 2xx: a failure
		},
	}}
}

// post returns the status of the answer; it ends early when stop is closed.
func (p *poster) post(stop <-chan struct{}, url string, body []byte, headers map[string]string) (int, error) {
	ctx, cancel := context.WithTimeout(context.Background(), p.timeout)
	defer cancel()
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		select {
		case <-stop:
			cancel()
		case <-ended:
		}
	}()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return 0, fmt.Errorf("webhook: %w", err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "Svix-Webhooks/1.0 (fake)")
	for k, v := range headers {
		req.Header.Set(k, v)
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, nil
}

func (p *poster) close() { p.client.CloseIdleConnections() }

// bounced is what a webhook tells of a bounce.
type bounced struct {
	Type       string   `json:"type"`
	SubType    string   `json:"subType"`
	Message    string   `json:"message"`
	Diagnostic []string `json:"diagnosticCode"`
}

type reason struct {
	Type    string `json:"type,omitempty"`
	Message string `json:"message,omitempty"`
	Reason  string `json:"reason,omitempty"`
}

// event is the envelope of a webhook.
type event struct {
	Type      string    `json:"type"`
	CreatedAt string    `json:"created_at"`
	Data      eventData `json:"data"`
}

type eventData struct {
	EmailID    string            `json:"email_id"`
	MessageID  string            `json:"message_id"`
	CreatedAt  string            `json:"created_at"`
	From       string            `json:"from"`
	To         addresses         `json:"to"`
	Subject    string            `json:"subject"`
	Tags       map[string]string `json:"tags,omitempty"`
	Bounce     *bounced          `json:"bounce,omitempty"`
	Failed     *reason           `json:"failed,omitempty"`
	Suppressed *reason           `json:"suppressed,omitempty"`
}

func (k *hooks) payload(serial int64, m *mail, e entry, p happening) []byte {
	id := k.s.ids.uuid(serial)
	iso := func(d time.Duration) string { return k.s.started.Add(d).UTC().Format("2006-01-02T15:04:05.000Z") }
	x := event{Type: p.event, CreatedAt: iso(p.due), Data: eventData{
		EmailID: id, MessageID: messageID(id), CreatedAt: iso(e.at), From: m.From, To: m.To, Subject: m.Subject,
	}}
	for _, t := range m.Tags {
		if x.Data.Tags == nil {
			x.Data.Tags = map[string]string{}
		}
		x.Data.Tags[t.Name] = t.Value
	}
	switch p.event {
	case "email.bounced":
		kind := bounceKinds[e.bounce]
		x.Data.Bounce = &bounced{
			Type: kind, SubType: bounceTypes[kind], Message: "The recipient's mail server did not take the mail.",
			Diagnostic: []string{"smtp; 550 5.1.1 no such mailbox"},
		}
	case "email.failed":
		x.Data.Failed = &reason{Reason: "failed_by_script"}
	case "email.suppressed":
		x.Data.Suppressed = &reason{Type: "OnAccountSuppressionList", Message: "The recipient is on the account's suppression list."}
	}
	return marshal(x)
}
