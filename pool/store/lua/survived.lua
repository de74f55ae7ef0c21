-- survived: the rank that lost an attempt to the sweep lives (it was stopped, or cut off): that loss was no crash.
-- KEY job hash
-- ARG nonce str
-- FLAGS allow-oom
-- RETURN {"forgiven"} | {"void"}
local seen = redis.call('HMGET', job, 'state', 'blamed')
if not seen[2] or (seen[1] ~= 'queued' and seen[1] ~= 'running') then return {'void'} end
local rest, found = string.gsub(' ' .. seen[2], ' ' .. nonce .. ' ', ' ', 1)
if found == 0 then return {'void'} end
redis.call('HSET', job, 'blamed', string.sub(rest, 2), 'suspect', 0)
redis.call('HINCRBY', job, 'crashes', -1)
return {'forgiven'}
