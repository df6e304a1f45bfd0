package resendapi

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"mailproof/fakes/control"
	"mailproof/fakes/script"
)

// The stages of a request that sends, in order, and of what follows. A rule
// strikes when the stage begins: at StageRequest the whole request was read and
// nothing was looked at, at StageReserved it was found good and holds its
// idempotency key, at StageStored the mail is kept and not yet answered, at
// StageReplied the answer was written.
const (
	StageConnect  script.Stage = "connect"  // accepted, nothing read
	StageHeaders  script.Stage = "headers"  // the request's head was read
	StageBody     script.Stage = "body"     // inside the body, after Action.Bytes
	StageRequest  script.Stage = "request"  // the whole request
	StageReserved script.Stage = "reserved" // checked, key in flight, nothing kept
	StageStored   script.Stage = "stored"
	StageReplied  script.Stage = "replied"
	// StageOther is any request that sends nothing (GET /emails/{id},
	// webhooks), its head read. Match ":path" and ":method" as headers to tell
	// them apart.
	StageOther script.Stage = "other"
	// StageLifecycle is asked once per kept mail: what becomes of it.
	StageLifecycle script.Stage = "lifecycle"
	// StageWebhook is asked before each try to deliver an event; the header
	// ":type" is its type.
	StageWebhook script.Stage = "webhook"
)

// Actions of an HTTP API beside those of package script.
const (
	// SlowHeaders sends the answer's head byte by byte, For apart, then the
	// rest at once.
	SlowHeaders script.Kind = "alter-slow-headers"
	// Empty sends the regular status with an empty body.
	Empty script.Kind = "alter-empty"
	// NoID sends {} in place of the body.
	NoID script.Kind = "alter-no-id"
	// Truncate sends a correct answer whose JSON ends in the middle.
	Truncate script.Kind = "alter-truncate"
	// ExpireKey forgets the request's idempotency key at this point.
	ExpireKey script.Kind = "alter-expire-key"

	// What becomes of a mail: at StageLifecycle, For after it was sent.
	Deliver  script.Kind = "deliver"
	Bounce   script.Kind = "bounce"   // Error: Permanent, Transient …; Text: the message
	Complain script.Kind = "complain" // delivered, then complained
	Suppress script.Kind = "suppress"
	Fail     script.Kind = "fail"
	Defer    script.Kind = "defer" // delivery_delayed, delivered For later

	// BadSignature signs a webhook wrongly, StaleTimestamp dates and signs it
	// For (10 minutes) in the past.
	BadSignature   script.Kind = "alter-signature"
	StaleTimestamp script.Kind = "alter-timestamp"
)

var (
	sending  = []script.Stage{StageHeaders, StageRequest, StageReserved, StageStored}
	answered = append([]script.Stage{StageOther}, sending...)
	anywhere = append([]script.Stage{StageConnect, StageBody, StageReplied}, answered...)
	life     = []script.Stage{StageLifecycle}
	hook     = []script.Stage{StageWebhook}
	withHook = append([]script.Stage{StageWebhook}, anywhere...)
)

var vocabulary = script.Vocabulary{
	Stages: []script.Stage{
		StageConnect, StageHeaders, StageBody, StageRequest, StageReserved, StageStored, StageReplied,
		StageOther, StageLifecycle, StageWebhook,
	},
	Actions: map[script.Kind][]script.Stage{
		script.Accept:            append(append([]script.Stage{StageLifecycle}, hook...), anywhere...),
		script.Reply:             answered,
		script.Drop:              withHook,
		script.Delay:             withHook,
		script.Reset:             anywhere,
		script.Hang:              anywhere,
		script.HoldUntilReleased: anywhere,
		script.Drip:              answered,
		script.Cut:               answered,
		script.Garbage:           answered,
		script.Rate:              {StageConnect, StageHeaders, StageRequest, StageOther},
		SlowHeaders:              answered,
		Empty:                    answered,
		NoID:                     answered,
		Truncate:                 answered,
		ExpireKey:                sending,
		Deliver:                  life,
		Bounce:                   life,
		Complain:                 life,
		Suppress:                 life,
		Fail:                     life,
		Defer:                    life,
		script.Duplicate:         hook,
		script.Reorder:           hook,
		BadSignature:             hook,
		StaleTimestamp:           hook,
	},
	KeyKnownAt: []script.Stage{
		StageHeaders, StageBody, StageRequest, StageReserved, StageStored, StageReplied, StageOther,
		StageLifecycle, StageWebhook,
	},
	Check: checkAction,
}

func checkAction(a script.Action) error {
	switch {
	case a.Kind == Bounce:
		return checkBounce(a)
	case a.Kind != script.Reply && a.Error != "":
		return errors.New("action.error goes with \"reply\" and \"bounce\" only")
	case a.Kind == script.Reply:
		return checkReply(a)
	}
	return nil
}

func checkReply(a script.Action) error {
	if a.Error != "" {
		if _, ok := errorNamed(a.Code, a.Error); !ok {
			return fmt.Errorf("action.error %q with code %d is not in the table of errors", a.Error, a.Code)
		}
		return nil
	}
	if a.Code < 200 || a.Code > 599 || http.StatusText(a.Code) == "" {
		return fmt.Errorf("action.code %d is no final HTTP status", a.Code)
	}
	if a.Code < 400 && a.Stage != StageReserved && a.Stage != StageStored {
		return fmt.Errorf("action.code %d: a positive answer to a send can only be scripted at stage reserved or stored", a.Code)
	}
	return nil
}

// The types and subtypes of a bounce, as webhooks name them.
var bounceTypes = map[string]string{
	"": "General", "Permanent": "General", "Transient": "MailboxFull", "Undetermined": "Undetermined",
}

// bounceKinds are the types of a bounce; the first is the default.
var bounceKinds = []string{"Permanent", "Transient", "Undetermined"}

func checkBounce(a script.Action) error {
	if _, ok := bounceTypes[a.Error]; !ok {
		return fmt.Errorf("action.error %q of a bounce is not Permanent, Transient or Undetermined", a.Error)
	}
	return nil
}

// On begins a rule: this action at this stage.
func On(stage Stage, kind script.Kind) Builder { return script.On(stage, kind) }

func presets() []control.Preset {
	return []control.Preset{
		{Name: "do the work, lose each first answer", Rule: On(StageStored, Drop).First(1).Rule()},
		{Name: "lose half of the answers", Rule: On(StageStored, Drop).Chance(0.5).Rule()},
		{Name: "500 after the work, once a mail", Rule: On(StageStored, Reply).Code(500).First(1).Rule()},
		{Name: "502 of a proxy after the work", Rule: On(StageStored, Reply).Code(502).Times(1).Rule()},
		{Name: "503 before it", Rule: On(StageHeaders, Reply).Code(503).Times(5).Rule()},
		{Name: "429, come again in 2 s", Rule: On(StageRequest, Reply).Code(429).For(2 * time.Second).Times(5).Rule()},
		{Name: "daily quota used up", Rule: On(StageRequest, Reply).Error("daily_quota_exceeded").Times(5).Rule()},
		{Name: "hold while the key is in flight", Rule: On(StageReserved, HoldUntilReleased).Times(1).Rule()},
		{Name: "answer 200 and discard", Rule: On(StageReserved, Reply).Code(200).Times(1).Rule()},
		{Name: "200 without an id", Rule: On(StageStored, NoID).Times(1).Rule()},
		{Name: "forget the key after the work", Rule: On(StageStored, ExpireKey).Times(1).Rule()},
		{Name: "bounce", Rule: On(StageLifecycle, Bounce).Times(1).Rule()},
		{Name: "webhooks twice", Rule: On(StageWebhook, Duplicate).Times(5).Rule()},
	}
}
