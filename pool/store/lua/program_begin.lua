-- program_begin: start an attempt at a Program's job, as begin does for others, where its rank still has the place.
-- KEY job hash
-- KEY queue stream of the rank
-- KEY leases zset
-- KEY timers zset
-- KEY model hash
-- KEY program hash
-- KEY book hash
-- ARG token str
-- ARG entry str stream entry that was read
-- ARG rank str consumer that read it, and the rank of the place
-- ARG incarnation str of the rank's process
-- ARG nonce str random fence of the new attempt
-- ARG lease ms
-- ARG alone how far, as in begin
-- INCLUDE clock beginning
-- FLAGS allow-oom
-- RETURN {"ok", what begin replies, {value of each field of the Program in PLACED}, dispatched_ms, retention_ms} | what else begin
--   replies | {"fenced"}: whoever takes over the rank's work has it
local PLACED = {'gen', 'epoch', 'prompt', 'ctx', 'shared', 'fresh_ms', 'rounds', 'segment', 'finish_ms', 'activated_ms'}
local own = redis.call('HMGET', job, 'generation', 'epoch', 'entry', 'dispatched_ms', 'retention_ms')
local place = redis.call('HMGET', program, 'gen', 'epoch', 'seat', 'rank')
if own[3] == entry and (own[1] ~= place[1] or own[2] ~= place[2] or place[3] ~= incarnation or place[4] ~= rank
  or redis.call('HGET', book, 'incarnation') ~= incarnation) then return {'fenced'} end
local reply = beginning()
if reply[1] ~= 'ok' then return reply end
return {'ok', reply, redis.call('HMGET', program, unpack(PLACED)), own[4], own[5]}
