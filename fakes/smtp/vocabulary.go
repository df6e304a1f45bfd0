package smtp

import (
	"fmt"

	"mailproof/fakes/script"
)

// The stages of a session, in order. A rule strikes when the stage begins:
// at StageMail the MAIL command was read and not yet answered, at StageDot the
// final dot was read and nothing is stored yet, at StageStored the copy is kept
// and not yet answered, at StageReplied the final answer was written.
const (
	StageConnect  script.Stage = "connect"  // accepted, greeting not yet written
	StageEHLO     script.Stage = "ehlo"     // EHLO or HELO
	StageSTARTTLS script.Stage = "starttls" // before the handshake
	StageAuth     script.Stage = "auth"
	StageMail     script.Stage = "mail"
	StageRcpt     script.Stage = "rcpt"
	StageData     script.Stage = "data" // DATA, or a mail's first BDAT
	StageBody     script.Stage = "body" // inside the body, after Action.Bytes
	StageDot      script.Stage = "dot"  // final dot, or BDAT LAST and its chunk
	StageStored   script.Stage = "stored"
	StageReplied  script.Stage = "replied"
	StageRset     script.Stage = "rset"
	StageNoop     script.Stage = "noop" // NOOP and VRFY
	StageQuit     script.Stage = "quit"
)

// Actions of SMTP beside those of package script.
const (
	// StripCaps removes the capabilities named in Action.Strip from the answer
	// to EHLO ("STARTTLS", "AUTH", "PIPELINING" …).
	StripCaps script.Kind = "alter-strip"
	// BreakTLS answers STARTTLS with 220 and closes inside the handshake.
	BreakTLS script.Kind = "tls-fail"
	// Mismatch answers in several lines whose codes differ.
	Mismatch script.Kind = "alter-mismatch"
	// Disagree answers with an enhanced code of another class than the basic
	// one: "451 5.7.1", "250 4.0.0". The basic one counts (RFC 5321 4.3.2).
	Disagree script.Kind = "alter-disagree"
	// Tarpit reads the body slowly: For between two chunks.
	Tarpit script.Kind = "alter-tarpit"
)

var vocabulary = script.Vocabulary{
	Stages: []script.Stage{
		StageConnect, StageEHLO, StageSTARTTLS, StageAuth, StageMail, StageRcpt, StageData, StageBody,
		StageDot, StageStored, StageReplied, StageRset, StageNoop, StageQuit,
	},
	Actions: map[script.Kind][]script.Stage{
		script.Accept:            everywhere,
		script.Reply:             answered,
		script.Drop:              everywhere,
		script.Reset:             everywhere,
		script.Hang:              everywhere,
		script.HoldUntilReleased: everywhere,
		script.Delay:             everywhere,
		script.Swallow:           answered,
		script.Drip:              answered,
		script.Cut:               answered,
		script.Garbage:           answered,
		Mismatch:                 answered,
		Disagree:                 answered,
		script.Greylist:          {StageRcpt},
		script.Rate:              {StageConnect, StageEHLO, StageMail, StageRcpt, StageData, StageDot},
		StripCaps:                {StageEHLO},
		BreakTLS:                 {StageSTARTTLS},
		Tarpit:                   {StageBody},
	},
	KeyKnownAt: []script.Stage{StageDot, StageStored, StageReplied},
	Known: map[string][]script.Stage{
		"client":       except(StageConnect),
		"sender":       {StageMail, StageRcpt, StageData, StageBody, StageDot, StageStored, StageReplied},
		"recipient":    {StageRcpt, StageData, StageBody, StageDot, StageStored, StageReplied},
		"nth":          {StageRcpt, StageData, StageBody, StageDot, StageStored, StageReplied},
		"message":      {StageMail, StageRcpt, StageData, StageBody, StageDot, StageStored, StageReplied},
		"recipient_no": {StageRcpt},
	},
	Check: checkAction,
}

// except is every stage but one.
func except(one script.Stage) []script.Stage {
	var out []script.Stage
	for _, s := range everywhere {
		if s != one {
			out = append(out, s)
		}
	}
	return out
}

var answered = []script.Stage{
	StageConnect, StageEHLO, StageSTARTTLS, StageAuth, StageMail, StageRcpt, StageData,
	StageDot, StageStored, StageRset, StageNoop, StageQuit,
}

var everywhere = append([]script.Stage{StageBody, StageReplied}, answered...)

func checkAction(a script.Action) error {
	if a.Kind == script.Reply {
		return checkCode(a)
	}
	if a.Kind == StripCaps && len(a.Strip) == 0 {
		return fmt.Errorf("action %q needs \"strip\"", a.Kind)
	}
	if a.Kind == Tarpit && a.For == 0 {
		return fmt.Errorf("action %q needs \"for\"", a.Kind)
	}
	return nil
}

func checkCode(a script.Action) error {
	if a.Code < 200 || a.Code > 599 {
		return fmt.Errorf("action.code %d is no SMTP reply code", a.Code)
	}
	// A positive answer that the session's state does not share would leave
	// client and server in different places for good. After the dot it is the
	// lie "250 and discard", which is a fault worth having.
	if a.Code < 400 && a.Stage != StageDot && a.Stage != StageStored {
		return fmt.Errorf("action.code %d: a positive answer can only be scripted at stage dot or stored", a.Code)
	}
	if a.Code < 200 || (a.Code >= 300 && a.Code < 400) {
		return fmt.Errorf("action.code %d is no final answer", a.Code)
	}
	if a.Enhanced == "" {
		return nil
	}
	var x, y, z int
	if _, err := fmt.Sscanf(a.Enhanced, "%d.%d.%d", &x, &y, &z); err != nil || fmt.Sprintf("%d.%d.%d", x, y, z) != a.Enhanced {
		return fmt.Errorf("action.enhanced %q is not of the form 4.7.1", a.Enhanced)
	}
	return nil
}
