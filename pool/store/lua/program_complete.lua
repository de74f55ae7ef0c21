-- program_complete: end a running job of a Program, once, as complete does for others, and say what it told of the
-- Program. One of a place that the Program no longer has changes nothing.
-- GROUP keys job log queue index leases outbox timers tombstone tally tenants
-- KEY program hash
-- KEY pool list
-- KEY gone string
-- KEY front hash the job that its pool begins with; any key where none is known
-- KEY coefficients hash
-- KEYS blocks hash those of its input, in order
-- ARG token str
-- ARG attempt str
-- ARG nonce str
-- ARG first_seq tokens logged before the first of these
-- ARG count tokens in these entries
-- ARG entries list
-- ARG state str terminal state
-- ARG ttl ms
-- ARG fields list name, value ... of the terminal record
-- ARG outcome list name, number ... of the request (lib/settle.lua), and how the Program is held (lib/rest.lua)
-- ARG sample str packed, for the window of requests; "" for none
-- ARG id str of the Program
-- ARG rank str that the Program is bound to
-- ARG front_token str
-- INCLUDE clock kept inputs lanes withdrawing entries charge finish record book figures waiting place rest concerned settle
-- FLAGS allow-oom
-- RETURN {"ok", watch} | {"resend", log end} | {"stale", state} | {"gone"}
--   | {"moved", rank} | {"front", token, log end} to be declared
local seen = redis.call('HMGET', keys.job, unpack(ENDING))
if not seen[1] then return {'gone'} end
if seen[1] ~= 'running' or seen[9] ~= attempt or seen[10] ~= nonce then return {'stale', seen[1]} end
if undeclared(seen[11], blocks) then return redis.error_reply('ERR program_complete must declare the input blocks') end
local p, ticket, refused = concerned(at, keys.job)
local logged = tonumber(seen[8] or 0)
if refused then return {refused[1], refused[2], logged} end
local own = redis.call('HMGET', keys.job, 'epoch', 'ends')
if p and (is_stale(at, p) and not may_end(at, p) or tonumber(own[1]) ~= p[0].were.epoch) then return {'stale', seen[1]} end
if first_seq ~= logged then return {'resend', logged} end
for i = 1, #entries, 1000 do
  redis.call('RPUSH', keys.log, unpack(entries, i, math.min(i + 999, #entries)))
end
fields[#fields + 1], fields[#fields + 2] = 'tokens', logged + count
seen[8], keys.blocks = logged + count, blocks
local watch = finish(keys, token, seen, state, ttl, at.ms, fields)
local done = state == 'completed' or state == 'incomplete'
local o = {ends = done and own[2]}
for i = 1, #outcome, 2 do o[outcome[i]] = tonumber(outcome[i + 1]) end
if p and done then
  settle_request(at, p, o, sample)
  learn_coefficient(coefficients, keys.job, o.prompt)
end
conclude(at, p, ticket, token, done and 'completed' or 'request_failed', o)
return {'ok', watch}
